"""Result of locating, and its JSON form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.words import number, table_lines
from kc_otel.diagnose.above_noise import (
    NOISE_FACTOR,
    NULL_SHARE,
    BoundaryDrift,
    ComponentShare,
    Measured,
    Shares,
    batch_dependence,
    least_sequences,
    sequences_to_name,
)
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, SAMPLER, TOKENS, Boundary, by_operator
from kc_otel.judge.plain_json import to_plain
from kc_otel.stats import Interval

_UNRELATED_RELATIVE_ERROR: Final = 0.7
"""Relative error of the embedding beyond which two kernels have other weights; quantised ones stay below 0.1."""

Kind = Literal["tokens", "shape", "drift", "batch", "sampler"]

_HEADER: Final = ("boundary", "own error", "drift", "floor", "prompt", "completion", "above")
_MAX_BOUNDARIES: Final = 12
_ROUGH: Final = (0.8, 1.25)
"""Sums of the shares, as a share of the observed drift, outside of which they are rough."""


class NotComparableError(ValueError):
    """Two kernels that cannot be held against each other; the message says why."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Something that is not noise, at a boundary and a module; `tensors` differ, or cut inputs off."""

    kind: Kind
    boundary: Boundary
    module: str
    sentence: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to which operator it is; boundaries and findings are in the order of execution.

    `culprit` has the largest share of the drift of `metric`, without shares the largest error; `observed` is that drift
    as it ran, mean over sequences. `confidence` is of everything together; `settings` are to be looked at first.
    """

    contract: str
    slice: str
    metric: str
    sequences: int
    tokens: int
    boundaries: tuple[BoundaryDrift, ...]
    findings: tuple[Divergence, ...]
    culprit: Divergence | None
    shares: Shares | None
    observed: float
    notes: tuple[str, ...]
    confidence: float
    settings: tuple[str, ...] = ()
    unreached: tuple[Boundary, ...] = ()

    @property
    def undecided(self) -> str:
        """Reason why nothing is named and nothing ruled out; empty if it is decided.

        Nothing is above noise only where it would have been seen: by sequences enough, at every boundary of both
        kernels, with no more of them beyond the floor than where nothing is wrong.
        """
        if self.findings:
            return ""
        alpha, many = 1.0 - self.confidence, 2 * len(self.boundaries)
        suspects = [boundary for boundary in self.boundaries if boundary.above.estimate > NULL_SHARE]
        if suspects:
            worst = max(suspects, key=lambda suspect: suspect.error / suspect.floor)
            needed = sequences_to_name(worst.above.estimate, many, alpha) or 0
            reached = int(worst.above.samples)
            return (
                f"{worst.boundary} differs by {number(worst.error / worst.floor)} times its floor, and "
                f"{number(100 * worst.above.estimate)} % of {reached} sequences are beyond twice the floor, "
                f"which proves nothing at {len(self.boundaries)} boundaries; "
                f"give {max(needed, reached + 1)} sequences or more{' that reach it' * (reached < self.sequences)}"
            )
        if self.sequences < (least := least_sequences(many, alpha)):
            said = f"{self.sequences} sequences cannot name anything at {len(self.boundaries)} boundaries"
            return f"{said}; give {least} or more"
        return self.not_covered

    @property
    def not_covered(self) -> str:
        """Operators of both kernels that too few sequences reached to name them; empty if there are none."""
        least = least_sequences(2 * len((*self.boundaries, *self.unreached)), 1.0 - self.confidence)
        rare = [row.boundary for row in self.boundaries if row.above.samples < min(least, self.sequences)]
        said = [
            f"{reached}: {'; '.join(names[:_MAX_BOUNDARIES])}{' and more' * (len(names) > _MAX_BOUNDARIES)}"
            for reached, names in (
                ("no sequence reached these operators of both kernels", list(by_operator(self.unreached))),
                (f"fewer than {least} sequences reached these, too few to name one", list(by_operator(rare))),
            )
            if names
        ]
        remedy = f"give {least} or more that do, such as longer ones"
        if self.unreached:
            remedy += "; operators whose weights alone a function is given, without a call of theirs, are not compared"
        return f"{'; '.join(said)}; {remedy}" if said else ""

    @property
    def first(self) -> Divergence | None:
        """The first finding in the order of execution."""
        return self.findings[0] if self.findings else None

    @property
    def explained(self) -> float:
        """Sum of the shares, as a share of the observed drift; nan without shares."""
        if self.shares is None:
            return math.nan
        return self.shares.whole / self.observed if self.observed else 0.0

    @property
    def is_rough(self) -> bool:
        """True if the parts sum to much more or less than the observed drift."""
        return not _ROUGH[0] <= self.explained <= _ROUGH[1]


def between(error: Interval) -> str:
    """An error with its interval, where there are sequences enough for one."""
    if not (math.isfinite(error.lower) and math.isfinite(error.upper)):
        return f"{number(error.estimate)} ({error.samples:g} sequences are too few for an interval)"
    return f"{number(error.estimate)} [{number(error.lower)}, {number(error.upper)}]"


def related(errors: NDArray[np.float64] | None) -> None:
    """Refuse weights of another training, by the relative errors of the embedding; None where there is none."""
    if errors is not None and float(np.median(errors)) > _UNRELATED_RELATIVE_ERROR:
        raise NotComparableError(
            "the embeddings of the same tokens have nothing to do with each other: the checkpoints are others"
        )


def same_layers(train: Iterable[Boundary], inference: Iterable[Boundary]) -> None:
    """Refuse kernels of different depth."""
    ours, theirs = ({boundary.layer for boundary in side if boundary.layer is not None} for side in (train, inference))
    if ours != theirs:
        raise NotComparableError(
            f"the training kernel has {len(ours)} layers and the inference kernel {len(theirs)}: "
            "they are not the same checkpoint, or layers of one are not recognised"
        )


def cut_vocabulary(shapes: Iterable[tuple[Boundary, int, int]], module: str = "") -> list[Divergence]:
    """A head with another vocabulary; anything else whose features differ is refused as another model."""
    found = []
    for boundary, ours, theirs in shapes:
        if boundary not in {HEAD, OUTPUT}:
            raise NotComparableError(
                f"{boundary} has {ours} features in training and {theirs} in inference: "
                "the kernels are not the same checkpoint; give both the same"
            )
        sentence = f"{ours} tokens in training and {theirs} in inference: the vocabulary is cut"
        found.append(Divergence("shape", boundary, module, sentence))
    return found[:1]  # what a head lacks its output lacks, too


def other_tokens(prompts: Iterable[tuple[Sequence[int], Sequence[int]]], of: int) -> list[Divergence]:
    """Conversations that become other tokens in training and in inference, of so many, with one example."""
    other = [(ours, theirs) for ours, theirs in prompts if ours != theirs]
    if not other:
        return []
    ours, theirs = other[0]
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    sentence = (
        f"{len(other)} of {of} prompts become other tokens: the first from token {place} on, "
        f"{list(ours[place : place + 4])} in training and {list(theirs[place : place + 4])} in inference; "
        "compare the tokenizer and the chat template"
    )
    return [Divergence("tokens", TOKENS, "", sentence)]


def after_the_last(rows: Sequence[BoundaryDrift], modules: Mapping[Boundary, str]) -> str:
    """A difference of the models' outputs in words: what it comes after, and whether an operator differs, too."""
    operators = [row for row in rows if row.boundary not in {OUTPUT, SAMPLER}]
    place = modules.get(operators[-1].boundary) or str(operators[-1].boundary)
    agree = "" if any(row.is_above for row in operators) else " though every operator agrees"
    return f"after {place}: the outputs differ{agree}"


def by_size(findings: Sequence[Divergence], rows: Sequence[BoundaryDrift]) -> Divergence | None:
    """The finding with the largest error; other tokens and shapes come before any number, and their order is kept."""
    errors = {row.boundary: row.error for row in rows}
    first = next(iter(findings), None)
    if first is None or first.kind in {"tokens", "shape"}:
        return first
    return max(findings, key=lambda finding: errors.get(finding.boundary, 0.0) if finding.kind == "drift" else 0.0)


def batch_findings(
    measured: Mapping[Boundary, Measured], alpha: float, rounding: float, modules: Mapping[Boundary, str]
) -> list[Divergence]:
    """Operators whose numbers depend on the batch by more than the training kernel's do in the same number format."""
    found = []
    for key, (share, floor) in batch_dependence(measured, alpha, rounding).items():
        sentence = (
            f"its numbers depend on the batch: {number(100 * share.estimate)} % of sequences change by more than "
            f"{NOISE_FACTOR:g} times the training kernel's floor of {number(floor)}"
        )
        found.append(Divergence("batch", key, modules.get(Boundary(key.layer, key.operator), ""), sentence))
    return found


def settings_of(contract: Contract) -> list[str]:
    """Return the settings in which a contract's two kernels differ, other than the engine."""
    ours, theirs = contract.kernels.train.model_dump(), contract.kernels.inference.model_dump()
    other = [
        f"{name} {ours[name] or 'not set'} in training and {theirs[name] or 'not set'} in inference"
        for name in ours
        if name != "engine" and ours[name] != theirs[name]
    ]
    return [f"the contract's kernels differ: {'; '.join(other)}"] if other else []


def located_json(located: Located) -> dict[str, Any]:
    """The answer for a program, and as evidence; numbers that are not finite are texts."""
    found: dict[str, Any] = to_plain(located)
    return found | {"undecided": located.undecided, "first": to_plain(located.first)}


def located_lines(located: Located) -> Iterator[str]:
    """The answer, its evidence and what a reader has to know, a line each."""
    yield from _answer_lines(located)
    if located.shares is not None:
        amount = f"{number(located.shares.whole)} of {number(located.observed)} observed"
        yield f"shares of {located.metric} on {located.slice}, {amount}:"
        yield from (f"  {_share(component):>15}  {component.name}" for component in located.shares.components)
    yield ""
    yield from _table(located)
    for note in (*([located.not_covered] if located.findings and located.not_covered else ()), *located.notes):
        yield f"note: {note}"


def _answer_lines(located: Located) -> Iterator[str]:
    yield (
        f"{located.contract}, slice {located.slice}: {located.sequences} sequences, {located.tokens} tokens, "
        f"{len(located.boundaries)} boundaries"
    )
    for setting in located.settings:
        yield f"look first: {setting}"
    first = located.first
    if located.undecided:
        yield f"undecided: {located.undecided}"
    elif first is None or located.culprit is None:
        yield "no culprit: no boundary is above noise"
    else:
        yield f"culprit: {finding_name(located.culprit)}"
        yield f"  {located.culprit.sentence}"
        if located.shares and located.shares.whole:
            yield f"  {_largest_share(located, f' on {located.slice}')}"
        if first is not located.culprit:
            yield f"first divergence: {finding_name(first)}"
            yield f"  {first.sentence}"
        others = [finding for finding in located.findings if finding is not first and finding is not located.culprit]
        for other in others:
            if other.kind not in {"drift", "batch"}:
                yield f"also: {finding_name(other)}: {other.sentence}"
        for kind, said in (("drift", "above noise"), ("batch", "depends on the batch")):
            if named := by_operator(other.boundary for other in others if other.kind == kind):
                yield f"also {said}: {'; '.join(named)}"


def located_sentence(located: Located) -> str:
    """The answer in one line, for an incident's page and messages."""
    first, culprit = located.first, located.culprit
    seen = f"{located.sequences} sequences of {located.slice}, {located.confidence * 100:g} % confidence"
    if located.undecided:
        return f"undecided which operator it is: {located.undecided} ({seen})"
    if first is None or culprit is None:
        return f"no operator differs by more than noise on {seen}: these two programs show no cause of the drift"
    said = [f"{'first divergence' if culprit is first else 'culprit'}: {finding_name(culprit)}"]
    if culprit.tensors:
        said.append(next(part for part in culprit.sentence.split("; ") if part.startswith("tensor ")))
    if located.shares and located.shares.whole:
        said.append(_largest_share(located))
    if culprit is not first:
        said.append(f"first divergence: {finding_name(first)}")
    return f"{'; '.join(said)} ({seen})"


def finding_name(finding: Divergence) -> str:
    """Boundary and module."""
    kind = ", depends on the batch" if finding.kind == "batch" else ""
    return f"{finding.boundary}{kind}" + (f", module {finding.module}" if finding.module else "")


def _table(located: Located) -> Iterator[str]:
    boundaries = located.boundaries
    farthest = sorted(boundaries, key=lambda boundary: -boundary.error / boundary.floor)[:_MAX_BOUNDARIES]
    shown = [
        (
            str(boundary.boundary),
            _number(boundary.local.estimate),
            _number(boundary.drift.estimate),
            number(boundary.floor),
            _number(boundary.prefill),
            _number(boundary.decode),
            f"{100 * boundary.above.estimate:.0f} %{' *' if boundary.is_above else ''}",
        )
        for boundary in boundaries
        if boundary in farthest
    ]
    yield from table_lines(_HEADER, shown) if shown else ()
    if len(boundaries) > len(shown):
        yield f"... and {len(boundaries) - len(shown)} that are nearer to their floor; all are in --json"


def _number(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def _largest_share(located: Located, where: str = "") -> str:
    """The largest share; of what the errors above noise make, where that is much less than the observed drift."""
    assert located.shares
    largest, drift = located.shares.components[0], f"{located.metric}{where}"
    if located.explained < _ROUGH[0]:
        drift = f"the {number(100 * located.explained)} % of {drift} that errors above noise make"
    rough = " (roughly)" if located.is_rough else ""
    return f"{_share(largest)} of {drift} comes from {largest.name}{rough}"


def _share(component: ComponentShare) -> str:
    share = component.share
    return f"{_percent(share.estimate)} % [{_percent(share.lower)}, {_percent(share.upper)}]"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}".replace("-0", "0") if abs(share) < 0.005 else f"{100 * share:.0f}"
