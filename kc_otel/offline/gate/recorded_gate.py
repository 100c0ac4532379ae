"""The first stage in a team's CI: recordings in, a decision out.

Every recording is a window of its own, and every one has to pass. Clauses that no recording can hold, such as
`weights_lag`, are reported as not judged; clauses whose columns are missing from the recordings hold the gate.

Sequences that occur before, in a recording or in another one, are no further evidence. Two sequences that were sampled
have different tokens, or the same tokens after another prompt, and their
log-probabilities then differ in every token that is not certain. Three things show that one is another one again:

- both sides are the same, number for number;
- they have the same tokens, and these are too improbable to be sampled twice;
- the sampling side's numbers, rounded to a small part of themselves, occur before along nearly the whole sequence,
  whatever the other side says: a copy with small changes, a part of a longer sequence, a rotation, or several together.

The last one compares windows of tokens, not sequences. A window is so long that hardly any of independent tokens with
these numbers occurs twice. Rollouts that begin alike differ from where they part, and short answers and certain text
have too few numbers that tell anything. Copies that are changed by much more than the rounding are not found, and no
parts of less than eight tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.contract.words import did_you_mean
from kc_otel.judge.promotion.stages import Decision, GateOutcome, GateSpec, Stage, decide
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts, UnjudgedClause, by_contract, judge, recordable
from kc_otel.offline.gate.sampling_terms import in_force
from kc_otel.record.kernel import Kernel
from kc_otel.record.measure.arrays import Block
from kc_otel.record.measure.remarks import remarks
from kc_otel.record.measure.rounding import CoarseSide, coarse_side
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import load_recording

_SHARED_DATA_ERROR: Final = "{}: has {}; windows that share data count once, so leave one of them out"


@dataclass(frozen=True, slots=True)
class GateTerms:
    """Requirements of a gate for a kernel version.

    Attributes:
        windows: Fewest recordings; where more are given, all of them have to pass, and this is their number.
        require: Clauses that have to PASS; empty for every clause. A FAIL of any other still refuses the version.
        slices: Slices on which they have to; empty for all traffic and every slice of the contract.
        columns: Names of the recordings' columns, by role, where they are others than tools use.
        sequential: Whether somebody looks as a recording grows and stops when it suits, so that the bounds have to
            hold at every number of sequences at once.
        attributes: Attributes that every sequence gets besides its own; these win.
    """

    windows: int = 1
    require: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    sequential: bool = False
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatedRecording:
    """A recording's file, with the sequences and tokens in it that count.

    Attributes:
        identical: Whether both sides have the same number at every token.
        coarse: The side that was rounded to half precision where the other was not, None where none was; it follows
            from the bytes, so that evidence does not repeat it.
        sampling: Values of each sampling parameter that its sequences name, where the contract lists any.
        content: SHA-256 of the numbers in it, 64 hex digits; the same for a file that was saved in another way or has
            the sequences in another order.
        unchecked: Remarks on its numbers, and what they are too few, too sure or too ambiguous to be checked for;
            empty for nothing. It follows from the bytes, too.
        repeated: Further sequences that do not count, for they are others again; see `first_of_each`.
    """

    name: str
    sha256: str
    size: int
    sequences: int
    tokens: int
    identical: bool
    coarse: CoarseSide | None = None
    sampling: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    content: str = ""
    repeated: int = 0
    unchecked: str = ""


@dataclass(frozen=True, slots=True)
class OfflineGate:
    """A gate's terms, its verdicts on each recording and its decision on the inference kernel's version."""

    contract: Contract
    train: Kernel
    inference: Kernel
    terms: GateTerms
    inputs: tuple[GatedRecording, ...]
    judged: tuple[RecordingVerdicts, ...]
    decision: Decision
    at: float

    @property
    def unjudged(self) -> tuple[UnjudgedClause, ...]:
        """Clauses that no recording could be judged by."""
        return not_judged(self.judged)


def read_input(path: str | Path, terms: GateTerms = GateTerms()) -> tuple[GatedRecording, Recording]:
    """A recording without what it repeats, and what identifies its file.

    A sequence that is another one again, in whole or as a part of it, is no further observation: it counts once.

    Raises:
        RecordingError: If the file cannot be used.
    """
    whole = load_recording(path, columns=terms.columns or None).with_attributes(terms.attributes)
    (first,) = first_of_each(whole)
    recording = whole.only(first, np.ones(len(whole.masked), dtype=np.bool_))
    digest, size = digest_of(Path(path))
    identical = bool(np.array_equal(recording.train, recording.inference))
    about = GatedRecording(
        Path(path).as_posix(),
        digest,
        size,
        int(recording.lengths.size),
        int(recording.train.size),
        identical,
        coarse_side(recording.train, recording.inference),
        content=_content(recording),
        repeated=int(first.size - first.sum()),
        unchecked=""
        if recording.density
        else remarks(
            Block(
                np.arange(recording.lengths.size),
                recording.starts,
                recording.lengths,
                recording.train,
                recording.inference,
            ),
            recording.token_ids,
        ),
    )
    return about, recording


def _content(recording: Recording) -> str:
    sides = [np.split(side, recording.starts[1:]) for side in (recording.train, recording.inference)]
    digests = [
        hashlib.sha256(train.tobytes() + inference.tobytes()).digest() for train, inference in zip(*sides, strict=True)
    ]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _apart(recordings: Sequence[tuple[GatedRecording, Recording]]) -> list[tuple[GatedRecording, Recording]]:
    """Remove sequences that another recording has; one that has nothing of its own is refused."""
    if len(recordings) == 1:
        return list(recordings)
    seen: dict[str, str] = {}
    for about, _ in recordings:
        if about.content in seen:
            raise ValueError(_SHARED_DATA_ERROR.format(about.name, f"the same content as {seen[about.content]}"))
        seen[about.content] = about.name
    found = []
    for (about, recording), first in zip(recordings, first_of_each(*(rec for _, rec in recordings)), strict=True):
        if not first.any():
            raise ValueError(
                _SHARED_DATA_ERROR.format(about.name, "only sequences that repeat others of these recordings")
            )
        own = recording.only(first, np.ones(len(recording.masked), dtype=np.bool_))
        left = about.repeated + int(first.size - first.sum())
        found.append((replace(about, sequences=own.lengths.size, tokens=own.train.size, repeated=left), own))
    return found


def digest_of(path: Path) -> tuple[str, int]:
    """SHA-256 of a recording's bytes, 64 hex digits, and their number."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
            size += len(block)
    return found.hexdigest(), size


def gate_recordings(
    contract: Contract,
    recordings: Sequence[tuple[GatedRecording, Recording]],
    kernels: tuple[Kernel, Kernel],
    terms: GateTerms,
    now: float,
) -> OfflineGate:
    """Judge recordings, each as `read_input` returns it, and decide.

    Raises:
        ValueError: If a recording has nothing that the others have not, was sampled otherwise than the contract allows
            or does not say how, a clause or slice of the terms is not of the contract, an assumption is missing, or no
            clause can be judged by a recording at all.
    """
    recordings = _apart(recordings)
    check_terms(contract, terms)
    allowed = contract.promotion.sampling
    inputs = tuple(replace(about, sampling=in_force(about.name, recording, allowed)) for about, recording in recordings)
    pair = (kernels[0].fingerprint, kernels[1].fingerprint)
    judged = []
    for _, recording in recordings:
        parts = by_contract(recording, contract)
        judged.append(judge(contract, parts, now, pair, anytime=terms.sequential))
    terms = replace(terms, windows=max(terms.windows, len(judged)))
    decision = gate_decision(contract, judged, pair[1], terms, now)
    return OfflineGate(contract, *kernels, terms, inputs, tuple(judged), decision, now)


def check_terms(contract: Contract, terms: GateTerms) -> None:
    """Refuse terms that name a clause or slice that the contract does not have."""
    clauses, slices = [clause.id for clause in contract.clauses], SliceTable.of(contract).judged
    for option, what, given, known in (
        ("--require", "clause", terms.require, clauses),
        ("--slice", "slice", terms.slices, slices),
    ):
        for name in given:
            if name not in known:
                raise ValueError(
                    f"{option}: the contract has no {what} {name!r}; {did_you_mean(name, known, 'there are')}"
                )


def gate_decision(
    contract: Contract, judged: Sequence[RecordingVerdicts], version: str, terms: GateTerms, now: float
) -> Decision:
    """Return the decision that follows from the verdicts on each recording, with `stages.decide`.

    Raises:
        ValueError: If no clause can be judged by these recordings.
    """
    verdicts = [verdict for result in judged for verdict in result.verdicts]
    judgeable = {verdict.cell.clause for verdict in verdicts}
    slices = terms.slices or tuple(dict.fromkeys(verdict.cell.slice for verdict in verdicts))
    clauses = [clause for clause in contract.clauses if clause.id in (terms.require or judgeable)]
    if not judgeable or not clauses:
        raise ValueError(
            f"no clause of {contract.name} can be judged from these recordings: "
            + "; ".join(map(str, not_judged(judged)))
        )
    gate = GateSpec(
        stage=Stage.OFFLINE_CI,
        windows=terms.windows,
        window=0.0,
        long_window=0.0,
        cells=tuple((clause.id, slice) for clause in clauses for slice in slices),
        needed={clause.id: samples_needed(clause, contract.observability) for clause in clauses},
    )
    holds = [f"logits of {result.unreadable:,} tokens are not numbers" for result in judged if result.unreadable]
    if not terms.require:
        why = {clause.clause: str(clause) for clause in not_judged(judged)}
        holds += [
            f"{why.get(clause.id, f'{clause.id}: no verdict')}; or --require the other clauses"
            for clause in contract.clauses
            if clause.id not in judgeable and recordable(clause)
        ]
    return decide(gate, version, [Evaluation(now, result.verdicts) for result in judged], holds, now)


def not_judged(judged: Sequence[RecordingVerdicts]) -> tuple[UnjudgedClause, ...]:
    """Clauses that none of the recordings could be judged by."""
    judgeable = {verdict.cell.clause for verdicts in judged for verdict in verdicts.verdicts}
    missing = {lost.clause: lost for verdicts in judged for lost in verdicts.left_out if lost.clause not in judgeable}
    return tuple(missing.values())


_MIN_TELLING_TOKENS: Final = 8
"""Fewest tokens that are no certainties, from which on a sequence that occurs again was not sampled again by chance."""
_CERTAIN_NATS: Final = 0.01
"""A token's -log-probability, nats, up to which many sequences have the same number."""
_UNREPEATED_NATS: Final = 30.0
"""-log-probability of tokens that are not sampled twice: once in 10^13."""
_RELATIVE_RESOLUTION: Final = 5e-3
"""Part of itself to which a log-probability is rounded, about the drift of good kernels."""
_ROUNDED_BELOW_NATS: Final = 0.05
"""-log-probability, nats, far below which numbers are rounded to the same part of this."""
_REPEATED_SHARE: Final = 0.9
"""Part of a sequence's telling tokens that occur before, from which on all of it does."""
_MIN_WINDOW_TOKENS: Final = 4
"""Fewest tokens of a window, and fewest different tokens of a sequence whose tokens are compared."""
_MIN_BITS: Final = 2.5
"""Bits that a number tells, below which nothing is said: a model with some six different numbers repeats itself."""
_CONTINUED_SHARE: Final = 0.7
"""Part of the windows that occur before after which the next number is the same too. Where it is less, sequences have
windows in common from which they part, as rollouts of one prompt and those of a model with a short memory do, and
windows have to be longer."""
_SPARE_BITS: Final = 10
"""A window of independent tokens occurs again anywhere with probability 2^-10 at most."""


def first_of_each(*recordings: Recording) -> list[NDArray[np.bool_]]:
    """Mark the sequences that count: one of each set of copies, bool [S] for each recording.

    The first one counts, of sequences with different numbers of tokens the longest.
    """
    first = _by_content(recordings)
    inference = np.concatenate([recording.inference for recording in recordings])
    lengths = np.concatenate([recording.lengths for recording in recordings])
    tokens = np.repeat(first, lengths)
    first[first] = ~_occurs_before(inference[tokens], lengths[first])
    return np.split(first, np.cumsum([recording.lengths.size for recording in recordings])[:-1])


def _by_content(recordings: Sequence[Recording]) -> NDArray[np.bool_]:
    """Mark the first sequence with its numbers on both sides, and with its tokens where these identify it."""
    first, seen = [], set[bytes]()
    for recording in recordings:
        ids = recording.token_ids
        for start, length in zip(recording.starts.tolist(), recording.lengths.tolist(), strict=True):
            part = slice(start, start + length)
            inference, keys = recording.inference[part], list[bytes]()
            if np.count_nonzero(inference) >= _MIN_TELLING_TOKENS:
                keys.append(_digest(recording.train[part], inference))
                if (
                    ids is not None
                    and inference.sum() <= -_UNREPEATED_NATS
                    and np.unique(ids[part]).size >= _MIN_WINDOW_TOKENS
                ):
                    keys.append(_digest(ids[part]))
            first.append(seen.isdisjoint(keys))
            seen.update(keys)
    return np.array(first, dtype=np.bool_)


def _digest(*numbers: NDArray[np.generic]) -> bytes:
    return blake2b(b"".join(number.tobytes() for number in numbers), digest_size=16).digest()


def _occurs_before(inference: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark sequences of which nearly all telling tokens lie in windows that longer or earlier ones have, bool [S]."""
    telling = np.isfinite(inference) & (inference < -_CERTAIN_NATS)
    owner = np.repeat(np.arange(lengths.size), lengths)[telling]
    size = np.bincount(owner, minlength=lengths.size)
    rounded = (
        np.floor(np.log(_ROUNDED_BELOW_NATS - inference[telling]) / _RELATIVE_RESOLUTION)
        .astype(np.int64)
        .view(np.uint64)
    )
    rank = np.empty(lengths.size, dtype=np.int64)
    rank[np.argsort(-size, kind="stable")] = np.arange(lengths.size)
    window, again = _recurring(rounded, owner, rank)
    covered = np.zeros(owner.size, dtype=np.bool_)
    for step in range(window):
        covered[again + step] = True
    found = np.bincount(owner[covered], minlength=lengths.size)
    return (size >= _MIN_TELLING_TOKENS) & (found >= _REPEATED_SHARE * size)


def _recurring(
    rounded: NDArray[np.uint64], owner: NDArray[np.int64], rank: NDArray[np.int64]
) -> tuple[int, NDArray[np.int64]]:
    """Tokens of a window, and where the windows begin that a sequence of a lower rank has, int64."""
    window = _window(rounded)
    rounded, owner = np.append(rounded, np.uint64(0)), np.append(owner, -1)  # entry after the last window
    while True:
        at = np.arange(max(owner.size - window, 0))
        at = at[owner[at] == owner[at + window - 1]]
        _, content = np.unique(_hashed(rounded, at, window), return_inverse=True)
        earliest = np.full(at.size, np.iinfo(np.int64).max)
        np.minimum.at(earliest, content, rank[owner[at]] * owner.size + at)
        before = earliest[content] % owner.size
        again = owner[before] != owner[at]
        at, before = at[again], before[again]
        on = (owner[at] == owner[at + window]) & (owner[before] == owner[before + window])
        if (rounded[at + window] == rounded[before + window])[on].sum() >= _CONTINUED_SHARE * on.sum():
            return window, at
        window *= 2


def _window(rounded: NDArray[np.uint64]) -> int:
    """Tokens after which chance alone makes hardly any window occur twice; the more, the fewer values there are."""
    _, counts = np.unique(rounded, return_counts=True)
    bits = -math.log2(np.square(counts / max(rounded.size, 1)).sum()) if rounded.size else 0.0
    needed = math.log2(max(rounded.size, 1)) + _SPARE_BITS
    return max(_MIN_WINDOW_TOKENS, math.ceil(needed / bits)) if bits >= _MIN_BITS else rounded.size + 1


def _hashed(rounded: NDArray[np.uint64], at: NDArray[np.int64], window: int) -> NDArray[np.uint64]:
    found = np.zeros(at.size, dtype=np.uint64)
    for step in range(window):
        found = (found ^ rounded[at + step]) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


_FIRST_LOOK: Final = 20
_LOOK_GROWTH: Final = 1.25
"""Each look costs a pass over all sequences so far: with this factor all together cost five times the last."""


def looks() -> Iterator[int]:
    """Numbers of sequences at which a gate looks.

    >>> from itertools import islice
    >>> list(islice(looks(), 5))
    [20, 25, 32, 40, 50]
    """
    number = _FIRST_LOOK
    while True:
        yield number
        number = math.ceil(number * _LOOK_GROWTH)


def decides(contract: Contract, recording: Recording, kernels: tuple[Kernel, Kernel], terms: GateTerms) -> bool:
    """Return True if the sequences so far decide the gate; clauses that no recording can judge do not delay it.

    The bounds are betting confidence sequences (`anytime` in `kc_otel.stats`): it costs no confidence to look again and
    again, and to stop where it suits, if the order of sequences says nothing of them.
    """
    in_force("the recording", recording, contract.promotion.sampling)
    pair = kernels[0].fingerprint, kernels[1].fingerprint
    found = judge(contract, by_contract(recording, contract), 0.0, pair, anytime=True)
    asked = replace(terms, windows=1, require=terms.require or tuple({judged.cell.clause for judged in found.verdicts}))
    return gate_decision(contract, [found], pair[1], asked, 0.0).outcome is not GateOutcome.WAIT
