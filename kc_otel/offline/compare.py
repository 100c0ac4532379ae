"""Judge two kernels' log-probabilities where they are at hand, without an evaluator."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra

with extra("stats", "kc_otel.compare"):
    from kc_otel.contract.load import load
    from kc_otel.contract.model import Contract
    from kc_otel.contract.sentences import scopes
    from kc_otel.contract.slices import Scalar
    from kc_otel.contract.words import interval, number, place
    from kc_otel.judge.plain_json import finite_or_none
    from kc_otel.judge.verdict import Status, Verdict
    from kc_otel.offline.gate.recorded_verdicts import UnjudgedClause, by_contract, judge
    from kc_otel.record.measure.rounding import CoarseSide, coarse_side
    from kc_otel.record.work import on_host, taken
    from kc_otel.recordings.assemble import assembled
    from kc_otel.recordings.recording import DENSITY, RecordingError
    from kc_otel.recordings.table import Ragged, RaggedTable

_NAMES: Final = {"train": "train_logprobs", "inference": "inference_logprobs"}
_WORST_FIRST: Final = (Status.FAIL, Status.INVALID_INPUT, Status.NO_DATA, Status.INCONCLUSIVE, Status.PASS)

Slices = Mapping[str, Any] | Sequence[Mapping[str, Scalar]]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JudgedComparison:
    """A contract's verdicts on a comparison; `print` shows it.

    Attributes:
        contract: The contract.
        verdicts: One for each clause and slice that can be judged from log-probabilities, the worst first.
        left_out: Clauses that cannot, and why.
        sequences: Sequences that were compared.
        tokens: Their tokens.
        coarse: The side that was rounded to half precision where the other was not; None where none was.
    """

    contract: Contract
    verdicts: tuple[Verdict, ...]
    left_out: tuple[UnjudgedClause, ...]
    sequences: int
    tokens: int
    coarse: CoarseSide | None = None

    @property
    def status(self) -> Status:
        """The worst status of all verdicts; NO_DATA without any."""
        return min((verdict.status for verdict in self.verdicts), key=_WORST_FIRST.index, default=Status.NO_DATA)

    def __repr__(self) -> str:
        contract = f"{self.contract.name} v{self.contract.metadata.version}"
        lines = [f"{self.status} under {contract}: {self.sequences:,} sequences, {self.tokens:,} tokens"]
        for verdict in self.verdicts:
            bounds = interval(finite_or_none(verdict.lower), finite_or_none(verdict.upper))
            lines.append(
                f"  {verdict.status:<12} {verdict.cell.clause} on {place(verdict.cell.slice)}: "
                f"{number(finite_or_none(verdict.estimate))}, interval {bounds}, limit {number(verdict.limit)}"
            )
        lines += [f"  not judged: {clause}" for clause in self.left_out]
        lines += [f"  note: {self.coarse}"] if self.coarse else []
        abouts = {verdict.cell.clause: verdict.about for verdict in self.verdicts}
        return "\n".join([*lines, *(f"  verdicts {scope}" for scope in scopes(abouts))])


def compare(
    train: Any,
    inference: Any,
    *,
    contract: Contract | str | os.PathLike[str],
    slices: Slices | None = None,
    mask: Any = None,
    advantages: Any = None,
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
            `{"task": ["code", "prose"]}`, or one value for all; or a mapping for each sequence.
        mask: Which tokens count.
        advantages: Per token, or per sequence.

    Raises:
        RecordingError: If the sides cannot be compared, with everything that is wrong.
        ValueError: If arguments do not fit, or a clause needs an assumption that the contract does not state.
        OSError: If the contract cannot be read.
    """
    promise = contract if isinstance(contract, Contract) else load(contract)
    given = {"train": train, "inference": inference, "mask": mask, "advantages": advantages}
    ragged = {name: _ragged(name, data) for name, data in given.items() if data is not None}
    sequences = ragged["train"].lengths.size
    for name, part in ragged.items():
        if part.lengths.size != sequences:
            raise RecordingError(f"{name}: {part.lengths.size} sequences, but train has {sequences}")
    attributes = _attributes(slices, sequences)
    if promise.assumptions.density:
        attributes = tuple({**row, DENSITY: True} for row in attributes)
    table = RaggedTable(
        "compare", ragged, {name: _NAMES.get(name, name) for name in ragged}, attributes, "sequence {}".format
    )
    recording = assembled(table)
    judged = judge(promise, by_contract(recording, promise), time.time())
    ordered = sorted(judged.verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.status))
    return JudgedComparison(
        promise,
        tuple(ordered),
        judged.left_out,
        recording.lengths.size,
        recording.train.size,
        coarse_side(recording.train, recording.inference),
    )


def _ragged(name: str, data: Any) -> Ragged:
    if isinstance(data, str | Path):
        raise TypeError(f"{name}: {str(data)!r} is a path; compare takes arrays, and `kc-otel compare` files")
    tree = taken(data)
    if isinstance(tree, list):
        return Ragged.of_rows([np.atleast_1d(on_host(row)) for row in tree])
    array = on_host(tree)
    if array.ndim not in {1, 2}:
        raise ValueError(f"{name}: shape {tuple(array.shape)} is neither [tokens] nor [sequences, tokens]")
    if name == "advantages" and array.ndim == 1:
        return Ragged.of_rows(list(array[:, None]))
    return Ragged.of_rows(list(np.atleast_2d(array)))


def _attributes(slices: Slices | None, sequences: int) -> tuple[Mapping[str, Scalar], ...]:
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
            msg = f"slices: {name} has {len(columns[name])} values for {sequences} sequences; give one for each"
            raise ValueError(msg)
    return tuple({name: values[row] for name, values in columns.items()} for row in range(sequences))
