"""Two kernels' log-probabilities compared without an evaluator: arrays in Python, and recordings by slice."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra

with extra("stats", "kc_otel.compare"):
    from kc_otel.contract.load import load
    from kc_otel.contract.model import Contract
    from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
    from kc_otel.contract.sentences import scopes
    from kc_otel.contract.slices import ALL, Scalar
    from kc_otel.contract.words import interval, number, place
    from kc_otel.judge.plain_json import finite_or_none, for_others
    from kc_otel.judge.verdict import Status, Verdict
    from kc_otel.offline.gate.copies import distinct, recording_notes
    from kc_otel.offline.gate.recorded_verdicts import (
        ADVANTAGE,
        RecordingObservations,
        RecordingVerdicts,
        UnjudgedClause,
        by_contract,
        judge,
        recordable,
        verdict_for_others,
    )
    from kc_otel.record.measure.arrays import on_host
    from kc_otel.record.measure.logits import LOGITS
    from kc_otel.record.work import taken
    from kc_otel.recordings.read_table import RaggedTable
    from kc_otel.recordings.recording import DENSITY, Recording, RecordingError, with_prompt
    from kc_otel.recordings.recording_files import assembled
    from kc_otel.stats import Interval, capped_mean_interval, maximum_interval, quantile_interval, support_deficit

_NAMES: Final = {"train": "train_logprobs", "inference": "inference_logprobs"}
_WORST_FIRST: Final = (Status.FAIL, Status.INVALID_INPUT, Status.NO_DATA, Status.INCONCLUSIVE, Status.PASS)

Slices = Mapping[str, Any] | Sequence[Mapping[str, Scalar]]

_MAX_VALUES: Final = 20
_RANGE_COUNT: Final = 4


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JudgedComparison:
    """A contract's verdicts on a comparison; `print` shows it.

    Attributes:
        contract: The contract.
        verdicts: One for each clause and slice that can be judged from log-probabilities, the worst first.
        left_out: Clauses that cannot, and why.
        sequences: Sequences that were compared.
        tokens: Their tokens.
        notes: Sentences about sides that are equal or rounded otherwise, about sequences that repeat others, and about
            what the intervals assume of prompts that are not known.
    """

    contract: Contract
    verdicts: tuple[Verdict, ...]
    left_out: tuple[UnjudgedClause, ...]
    sequences: int
    tokens: int
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The worst status of all verdicts; NO_DATA without any, and of a clause in `left_out` that gates wait for."""
        lacking = {clause.clause for clause in self.left_out}
        empty = any(recordable(clause) for clause in self.contract.clauses if clause.id in lacking)
        found = [verdict.status for verdict in self.verdicts] + [Status.NO_DATA] * empty
        return min(found, key=_WORST_FIRST.index, default=Status.NO_DATA)

    def __repr__(self) -> str:
        contract = f"{self.contract.name} v{self.contract.metadata.version}"
        lines = [f"{self.status} under {contract}: {self.sequences:,} sequences, {self.tokens:,} tokens"]
        lines += [f"  {verdict_line(verdict)}" for verdict in self.verdicts]
        lines += [f"  not judged: {clause}" for clause in self.left_out]
        lines += [f"  note: {note}" for note in self.notes]
        abouts = {verdict.cell.clause: verdict.about for verdict in self.verdicts}
        return "\n".join([*lines, *(f"  verdicts {scope}" for scope in scopes(abouts))])


def verdict_line(verdict: Verdict) -> str:
    """A verdict in one line of text, with the reason where it did not PASS."""
    bounds = interval(finite_or_none(verdict.lower), finite_or_none(verdict.upper))
    why = "" if verdict.status is Status.PASS else f"; {verdict.reason}"
    return (
        f"{verdict.status:<12} {verdict.cell.clause} on {place(verdict.cell.slice)}: "
        f"{number(finite_or_none(verdict.estimate))}, interval {bounds}, limit {number(verdict.limit)}{why}"
    )


def compare(
    train: Any,
    inference: Any,
    *,
    contract: Contract | str | os.PathLike[str],
    slices: Slices | None = None,
    mask: Any = None,
    advantages: Any = None,
    groups: Any = None,
    prompt_ids: Any = None,
) -> JudgedComparison:
    """Judge two kernels on tokens that the inference kernel sampled, without an evaluator.

    >>> rng = np.random.default_rng(0)
    >>> rollout = -rng.exponential(1.0, (200, 40)) - 0.1
    >>> train = rollout + 0.002 * rng.standard_normal(rollout.shape)
    >>> found = compare(train, rollout, contract="contracts/rl-rollouts-bf16-fp8.yaml", slices={"task": ["code"] * 200})
    >>> found.sequences, found.tokens
    (200, 8000)

    Intervals and statuses are the evaluator's own, as if this were all that its windows hold.

    Args:
        train: log P(y), nats, under the training kernel: [sequences, tokens] or [tokens], NumPy or torch, or a list of
            sequences of different lengths.
        inference: log Q(y) of the same tokens under the kernel that sampled them.
        contract: The contract, or the path of its file.
        slices: Attributes for the contract's slices: for each attribute one value per sequence, such as
            `{"task": ["code", "prose"]}`, or one value for all; or a mapping for each sequence. A clause on
            `reward_drift` needs the `reward` of each, too.
        mask: Which tokens count.
        advantages: Per token, or per sequence.
        groups: Name of each sequence's prompt: rollouts of one prompt share its drift and count together. Without any,
            each sequence counts by itself, as if it were independent of the others, and `notes` say so.
        prompt_ids: Prompt tokens of each sequence, instead of `groups`: equal tokens are one prompt.

    Raises:
        RecordingError: If the sides cannot be compared, with everything that is wrong.
        ValueError: If arguments do not fit, or a clause needs an assumption that the contract does not state.
        OSError: If the contract cannot be read.
    """
    promise = contract if isinstance(contract, Contract) else load(contract)
    given = {"train": train, "inference": inference, "mask": mask, "advantages": advantages}
    columns = {name: _rows(name, data) for name, data in given.items() if data is not None}
    sequences = len(columns["train"])
    for name, rows in columns.items():
        if len(rows) != sequences:
            raise RecordingError(f"{name}: {len(rows)} sequences, but train has {sequences}")
    attributes = _attributes(slices, sequences)
    if promise.assumptions.density:
        attributes = tuple({**row, DENSITY: True} for row in attributes)
    if groups is not None:
        if any(isinstance(name, list | tuple | np.ndarray) for name in groups):
            raise TypeError("groups: names of prompts, such as texts or numbers; give prompt tokens as prompt_ids")
        named = _attributes({"group": groups}, sequences, "groups")
        attributes = tuple({**row, **name} for row, name in zip(attributes, named, strict=True))
    if prompt_ids is not None:
        prompts = _rows("prompt_ids", prompt_ids)
        if len(prompts) != sequences:
            raise ValueError(f"prompt_ids: {len(prompts)} prompts for {sequences} sequences; give one for each")
        attributes = tuple(with_prompt(row, {"prompt_ids": ids}) for row, ids in zip(attributes, prompts, strict=True))
    table = RaggedTable(
        "compare", columns, {name: _NAMES.get(name, name) for name in columns}, attributes, "sequence {}".format
    )
    recording = distinct(assembled(table))
    judged = judge(promise, by_contract(recording, promise), time.time())
    if judged.no_decision:
        raise RecordingError(f"compare: {judged.no_decision}")
    ordered = sorted(judged.verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.status))
    return JudgedComparison(
        promise,
        tuple(ordered),
        judged.left_out,
        recording.lengths.size,
        recording.train.size,
        (*recording_notes(recording), *filter(None, [judged.prompts_note(promise, "name it with `groups=`")])),
    )


def _rows(name: str, data: Any) -> list[NDArray[Any]]:
    if isinstance(data, str | Path):
        raise TypeError(f"{name}: {str(data)!r} is a path; compare takes arrays, and `kc-otel compare` files")
    tree = taken(data)
    if isinstance(tree, list):
        return [np.atleast_1d(on_host(row)) for row in tree]
    array = on_host(tree)
    if array.ndim not in {1, 2}:
        raise ValueError(f"{name}: shape {tuple(array.shape)} is neither [tokens] nor [sequences, tokens]")
    if name == "advantages" and array.ndim == 1:
        return list(array[:, None])
    return list(np.atleast_2d(array))


def _attributes(slices: Slices | None, sequences: int, where: str = "slices") -> tuple[Mapping[str, Scalar], ...]:
    if slices is None:
        return tuple({} for _ in range(sequences))
    if not isinstance(slices, Mapping):
        rows = [dict(row) for row in slices]
        if len(rows) != sequences:
            raise ValueError(f"slices: {len(rows)} mappings for {sequences} sequences; give one for each")
        return tuple(rows)
    columns: dict[str, list[Any]] = {}
    for name, values in slices.items():
        scalar = isinstance(values, str) or np.ndim(values) == 0
        columns[name] = [values] * sequences if scalar else np.asarray(values).tolist()
        if len(columns[name]) != sequences:
            msg = f"{where}: {name} has {len(columns[name])} values for {sequences} sequences; give one for each"
            raise ValueError(msg)
    return tuple({name: values[row] for name, values in columns.items()} for row in range(sequences))


def comparison_data(
    recording: Recording,
    parts: Mapping[str, Recording | None],
    judged: RecordingVerdicts | None,
    *,
    confidence: float,
    clip: float,
) -> dict[str, Any]:
    """The quantities of each slice, and verdicts; a bound that is not claimed, and what is no number, are null.

    The confidence is of each interval by itself, half of the rest on either side.
    """
    return {
        "source": recording.source,
        "sequences": recording.lengths.size,
        "tokens": recording.train.size,
        "masked_sequences": recording.masked,
        "confidence": confidence,
        "clip": clip,
        "notes": list(recording_notes(recording)),
        "slices": [
            {
                "slice": name,
                "sequences": 0 if part is None else part.lengths.size,
                "tokens": 0 if part is None else part.train.size,
                "kc": {
                    quantity: {**for_others(interval), "unit": _unit(quantity)}
                    for quantity, interval in _quantities(part, confidence, clip).items()
                },
            }
            for name, part in parts.items()
        ],
        "verdicts": None if judged is None else list(map(verdict_for_others, judged.verdicts)),
        "not_judged": None if judged is None else [str(clause) for clause in judged.left_out],
    }


def _quantities(of: Recording | None, confidence: float, clip: float) -> dict[str, Interval]:
    if of is None:
        return {}
    samples, alpha = RecordingObservations(of), (1.0 - confidence) / 2.0

    def mean(quantity: str, scale: float = 1.0) -> Interval:
        known, sample = QUANTITIES[quantity], samples.for_mean(quantity)
        assert sample is not None
        return capped_mean_interval(
            sample, low=known.low, high=known.high, cap=known.cap, alpha_lower=alpha, alpha_upper=alpha, scale=scale
        )

    absolute, ratio = samples.of("abs_log_ratio"), samples.for_mean("ratio")
    assert absolute is not None
    assert ratio is not None
    chi2 = mean("chi2_token")
    own = {
        "tv_token": mean("tv_token"),
        "tv_seq": mean("tv_seq"),
        "k1": mean("log_ratio", -1.0),
        "k3": mean("k3"),
        "chi2_token": chi2,
        "ess_token": _effective(chi2),
        "abs_log_ratio mean": mean("abs_log_ratio"),
        "abs_log_ratio p99.9": quantile_interval(absolute, 0.999, alpha_lower=alpha, alpha_upper=alpha),
        "abs_log_ratio max": maximum_interval(absolute),
        "support_deficit": support_deficit(ratio, cap=QUANTITIES["ratio"].cap, alpha_lower=alpha, alpha_upper=alpha),
        "clip_budget_share": mean("abs_log_ratio", 1.0 / math.log1p(clip)),
    }
    own |= {quantity: mean(quantity) for quantity in (*ADVANTAGE, *LOGITS) if samples.of(quantity) is not None}
    return own


def _effective(chi2: Interval) -> Interval:
    """ESS/n = 1/(1 + chi2), which falls as chi2 rises."""
    low, high = max(chi2.lower, 0.0), chi2.upper
    return replace(chi2, estimate=1.0 / (1.0 + chi2.estimate), lower=1.0 / (1.0 + high), upper=1.0 / (1.0 + low))


def _unit(name: str) -> str:
    key = name.split(maxsplit=1)[0]
    if key in QUANTITIES:
        return QUANTITIES[key].unit
    return DERIVED[key].unit if key in DERIVED else "1"


def by_attributes(recording: Recording, names: Sequence[str]) -> dict[str, Recording | None]:
    """`all`, and a slice for each value of each attribute; of numbers with many values, for each quarter of them."""
    parts: dict[str, Recording | None] = {ALL: recording}
    for name in names:
        values = [attributes.get(name) for attributes in recording.attributes]
        given = [value for value in values if value is not None]
        if not given:
            known = sorted({attribute for attributes in recording.attributes for attribute in attributes})
            msg = f"{recording.source}: no sequence has an attribute {name!r}; there are {', '.join(known) or 'none'}"
            raise ValueError(msg)
        counts = Counter(map(str, given))
        if len(counts) > _MAX_VALUES and all(isinstance(value, int | float) for value in given):
            numbers = np.array([v if isinstance(v, int | float) else np.nan for v in values], dtype=np.float64)
            parts |= _ranges(recording, name, numbers)
            continue
        of = np.array([None if value is None else str(value) for value in values], dtype=object)
        kept = sorted(value for value, _ in counts.most_common(_MAX_VALUES))
        parts |= {f"{name}={value}": recording.only(of == value) for value in kept}
        rest = np.array([value is not None and value not in kept for value in of])
        if rest.any():
            parts[f"{name}=other"] = recording.only(rest)
    return parts


def _ranges(recording: Recording, name: str, values: NDArray[np.float64]) -> dict[str, Recording | None]:
    edges = np.unique(np.nanquantile(values, np.linspace(0.0, 1.0, _RANGE_COUNT + 1), method="lower"))
    parts: dict[str, Recording | None] = {}
    for place, (low, high) in enumerate(pairwise(edges)):
        last = place == edges.size - 2
        inside = (values >= low) & ((values <= high) if last else (values < high))
        parts[f"{name} in [{low:g}, {high:g}{']' if last else ')'}"] = recording.only(inside)
    return parts
