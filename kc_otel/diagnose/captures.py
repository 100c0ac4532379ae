"""Captures: the outputs of a kernel's operators in a file, and two of them held against each other.

Small, and so not without loss: of each sequence 32 positions are kept, evenly spaced, and of each output 64 random
projections, the same for every kernel, so that a relative error comes out within some tenth of what it is. While it is
written a capture is a folder with a file for each sequence; sealed it is one file with the SHA-256 of all of them.

Source: Johnson and Lindenstrauss 1984; Achlioptas 2003, Database-friendly random projections.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.words import number
from kc_otel.diagnose.above_noise import (
    ABOVE_NOISE,
    ROUNDING_RMS,
    BoundaryDrift,
    Measured,
    boundary_drift,
    enough_sequences,
)
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, SAMPLER, Boundary, by_operator, in_order
from kc_otel.diagnose.located import (
    Divergence,
    Located,
    NotComparableError,
    after_the_last,
    batch_findings,
    between,
    cut_vocabulary,
    other_tokens,
    related,
    same_layers,
    settings_of,
)

FORMAT: Final = "kc-otel capture 5"
_PROJECTED_FEATURES: Final = 64
_MAX_POSITIONS: Final = 32
_MAX_CAPTURE_BYTES: Final = 1 << 31
_HEADER, _SEAL = "header.json", "seal.json"


@dataclass(frozen=True, slots=True, eq=False)
class CapturedSequence:
    """One sequence as a kernel ran it; boundaries are in the order of execution.

    `outputs` are projections, float32 [positions, projections], and `features` their number before. `noise` and
    `precision` are relative errors against itself in another batch, and in the other's number format. `encoded` is what
    the kernel itself makes of the conversation; `unreached` are boundaries that the sequence did not reach.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    positions: NDArray[np.int64]
    outputs: Mapping[Boundary, NDArray[np.float32]]
    features: Mapping[Boundary, int]
    noise: Mapping[Boundary, float]
    precision: Mapping[Boundary, float]
    messages: tuple[Mapping[str, str], ...] = ()
    encoded: tuple[int, ...] | None = None
    unreached: tuple[Boundary, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Outputs of a kernel's operators on some sequences, with a description of the kernel."""

    kernel: str
    sequences: tuple[CapturedSequence, ...]


def kept_positions(tokens: int) -> NDArray[np.int64]:
    """Positions of a sequence that are kept, with the first and the last."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, _MAX_POSITIONS)).round().astype(np.int64))


def projected(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Outputs [positions, features] on random directions, [positions, at most 64]; lengths are kept on average."""
    if values.shape[1] <= _PROJECTED_FEATURES:
        return values
    return np.asarray(values @ _directions(values.shape[1]), dtype=np.float32)


@lru_cache(maxsize=64)
def _directions(features: int) -> NDArray[np.float32]:
    signs = np.random.default_rng([20260607, features]).integers(0, 2, (features, _PROJECTED_FEATURES), dtype=np.int8)
    return np.asarray((2 * signs - 1) / np.sqrt(_PROJECTED_FEATURES), dtype=np.float32)


def relative_error(
    reference: NDArray[np.float32], other: NDArray[np.float32], *, free: NDArray[np.float32] | None = None
) -> float:
    """Root mean square of the difference in shares of the reference's, but what is along `free`; inf for one finite."""
    ours, theirs = reference.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, theirs - ours)
    if not np.isfinite(difference).all():
        return float("inf")
    if free is not None:
        difference -= np.outer(difference @ free / (free @ free), free)
    size = float(np.linalg.norm(np.where(np.isfinite(ours), ours, 0.0)))
    error = float(np.linalg.norm(difference))
    return error / size if size else (float("inf") if error else 0.0)


class CaptureWriter:
    """Writes a capture, sequence by sequence; one of the same kernel that was begun before is gone on with."""

    def __init__(self, path: Path, kernel: str) -> None:
        self.path: Final = path
        self._folder: Final = path.with_name(f"{path.name}.part")
        if path.exists():
            raise ValueError(f"{path}: is there; a sealed capture is not changed, give another name or remove it")
        self._folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"format": FORMAT, "kernel": kernel})
        begun = self._folder / _HEADER
        if begun.exists() and begun.read_text(encoding="utf-8") != header:
            raise ValueError(f"{self._folder}: was begun for another kernel; remove it, or give another name")
        begun.write_text(header, encoding="utf-8")

    def has(self, index: int, token_ids: Sequence[int]) -> bool:
        """Return True if a sequence was written before the interruption."""
        return self._member(index, token_ids).exists()

    def write(self, index: int, asked: Sequence[int], sequence: CapturedSequence) -> None:
        """Append the captured tokens, all or none."""
        made = self._member(index, asked)
        unfinished = made.with_suffix(".unfinished")
        unfinished.write_bytes(_packed(sequence))
        unfinished.replace(made)

    def seal(self) -> None:
        """Make one file of it, with the hash of every member."""
        members = sorted(path for path in self._folder.iterdir() if path.suffix in {".npz", ".json"})
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in members}
        with zipfile.ZipFile(unfinished, "w") as packed:
            for path in members:
                packed.write(path, path.name)
            packed.writestr(_SEAL, json.dumps(hashes))
        unfinished.replace(self.path)
        shutil.rmtree(self._folder)

    def _member(self, index: int, token_ids: Sequence[int]) -> Path:
        digest = hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()
        return self._folder / f"{index:06d}-{digest[:16]}.npz"


def is_capture(path: Path) -> bool:
    """Return True if a file is a sealed capture."""
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return False
    with zipfile.ZipFile(path) as packed:  # a .npz is a zip, too
        return not any(name.endswith(".npy") for name in packed.namelist())


def read_capture(path: Path) -> Capture:
    """A sealed capture; a ValueError if it is none, is not sealed, or was changed after it was."""
    try:
        with zipfile.ZipFile(path) as packed:
            if sum(member.file_size for member in packed.infolist()) > _MAX_CAPTURE_BYTES:
                raise ValueError(f"{path}: is larger than {_MAX_CAPTURE_BYTES >> 30} GiB; capture fewer sequences")
            members = {member.filename: packed.read(member) for member in packed.infolist()}
        seal = json.loads(members.pop(_SEAL))
        header = json.loads(members[_HEADER])
        if header.get("format") != FORMAT:
            raise ValueError(f"{path}: is no capture of this version ({FORMAT}); capture again")
        changed = [name for name, raw in members.items() if seal.get(name) != hashlib.sha256(raw).hexdigest()]
        if changed or seal.keys() != members.keys():
            raise ValueError(f"{path}: was changed after it was sealed: {(changed or sorted(seal))[0]}; capture again")
        sequences = [_unpacked(members[name]) for name in sorted(members) if name != _HEADER]
    except (KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is no sealed capture ({error}); write one with `kc-otel locate capture`") from error
    return Capture(str(header["kernel"]), tuple(sequences))


def _packed(sequence: CapturedSequence) -> bytes:
    keys = list(sequence.outputs)
    about: dict[str, Any] = {
        "prompt_tokens": sequence.prompt_tokens,
        "messages": [dict(message) for message in sequence.messages],
        "encoded": sequence.encoded,
        "unreached": [[key.layer, key.operator] for key in sequence.unreached],
        "boundaries": [
            [
                key.layer,
                key.operator,
                key.part,
                sequence.features[key],
                sequence.noise.get(key),
                sequence.precision.get(key),
            ]
            for key in keys
        ],
    }
    arrays: dict[str, Any] = {f"o{index}": sequence.outputs[key] for index, key in enumerate(keys)}
    packed = io.BytesIO()
    ids = np.asarray(sequence.token_ids, dtype=np.int64)
    np.savez(packed, about=np.asarray(json.dumps(about)), token_ids=ids, positions=sequence.positions, **arrays)
    return packed.getvalue()


def _unpacked(raw: bytes) -> CapturedSequence:
    with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        rows = [(Boundary(layer, operator, part), rest) for layer, operator, part, *rest in about["boundaries"]]
        return CapturedSequence(
            token_ids=tuple(arrays["token_ids"].tolist()),
            prompt_tokens=int(about["prompt_tokens"]),
            positions=arrays["positions"],
            outputs={key: arrays[f"o{index}"] for index, (key, _) in enumerate(rows)},
            features={key: rest[0] for key, rest in rows},
            noise={key: rest[1] for key, rest in rows if rest[1] is not None},
            precision={key: rest[2] for key, rest in rows if rest[2] is not None},
            messages=tuple(about["messages"]),
            encoded=None if about["encoded"] is None else tuple(about["encoded"]),
            unreached=tuple(Boundary(layer, operator) for layer, operator in about["unreached"]),
        )


def rounding_of(dtype: str | None) -> float:
    """Relative error of writing a value in a number format, root mean square; of bfloat16 for what is quantised.

    >>> f"{rounding_of('bfloat16'):.1e} {rounding_of('float16'):.1e} {rounding_of('float32'):.1e}"
    '1.6e-03 2.1e-04 2.5e-08'
    """
    bits = {"float32": 23, "float16": 10, "half": 10, "float64": 52}.get((dtype or "").removeprefix("torch."), 7)
    return ROUNDING_RMS * 2.0**-bits


def compare_captures(
    contract: Contract, train: Capture, inference: Capture, *, slice: str = "all", rounding: float = 0.0
) -> Located:
    """Find where two kernels begin to differ by more than noise, and by more than `rounding` to a number format."""
    theirs = {sequence.token_ids: sequence for sequence in inference.sequences}
    pairs = [(sequence, theirs[sequence.token_ids]) for sequence in train.sequences if sequence.token_ids in theirs]
    if not pairs:
        raise NotComparableError(
            "the captures have no sequence of the same tokens: capture the second from the first's tokens "
            "(--sequences FIRST.capture), and compare tokenizer and chat template if you did"
        )
    alpha = 1.0 - contract.observability.confidence
    same_layers(pairs[0][0].outputs, pairs[0][1].outputs)
    of_both = {
        key: [(a, b) if key in a.outputs and key in b.outputs else None for a, b in pairs]
        for key in in_order(a.outputs for a, _ in pairs)
    }
    first = {key: pair for key, of in of_both.items() if (pair := next(filter(None, of), None))}
    keys = list(first)
    features = [(key, a.features[key], b.features[key]) for key, (a, b) in first.items() if key != SAMPLER]
    cut = cut_vocabulary(shape for shape in features if shape[1] != shape[2])
    keys = [key for key in keys if not cut or key not in {HEAD, OUTPUT, SAMPLER}]
    enough_sequences(len(pairs), len(keys), alpha)
    nan = np.full(len(pairs), np.nan)
    ours_alone = [a.noise for a, _ in pairs], [a.precision for a, _ in pairs]
    measured = {}
    for key in keys:
        noise, precision = (np.asarray([of.get(key, np.nan) for of in found]) for found in ours_alone)
        measured[key] = Measured(
            local=nan,
            drift=np.asarray([_part(key, *of) if of else np.nan for of in of_both[key]]),
            train_noise=noise,
            inference_noise=np.asarray([b.noise.get(key, np.nan) for _, b in pairs]),
            precision=precision,
            allowed=np.fmax(noise, precision),
            prefill=np.asarray([_part(key, *of, decode=False) if of else np.nan for of in of_both[key]]),
            decode=np.asarray([_part(key, *of, decode=True) if of else np.nan for of in of_both[key]]),
        )
    if all(key in measured and not np.isnan(measured[key].drift).any() for key in (SAMPLER, OUTPUT)):
        inherited = _inherited(pairs, measured[OUTPUT].drift)
        measured[SAMPLER] = replace(measured[SAMPLER], train_noise=np.fmax(measured[SAMPLER].train_noise, inherited))
    embedding = Boundary(None, "embedding")
    related(measured[embedding].drift if embedding in measured else None)
    rows = boundary_drift(measured, alpha / 2, rounding=rounding)
    encoded = [(a.encoded, b.encoded) for a, b in pairs if a.encoded is not None and b.encoded is not None]
    findings = [
        *other_tokens(encoded, len(encoded)),
        *cut,
        *_first(rows),
        *batch_findings(measured, alpha / 2, rounding, {})[:1],  # what lies behind it inherits it
    ]
    return Located(
        contract=contract.metadata.name,
        slice=slice,
        metric="",
        sequences=len(pairs),
        tokens=sum(len(a.token_ids) for a, _ in pairs),
        boundaries=rows,
        findings=tuple(findings),
        culprit=findings[0] if findings else None,
        shares=None,
        observed=float("nan"),
        notes=tuple(_notes(train, inference, pairs)),
        confidence=contract.observability.confidence,
        settings=tuple(settings_of(contract)),
        unreached=tuple(
            key for key in pairs[0][0].unreached if all(key in side.unreached for pair in pairs for side in pair)
        ),
    )


def _inherited(
    pairs: Sequence[tuple[CapturedSequence, CapturedSequence]], of_logits: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The log-probabilities' relative difference due to the logits': each is its logit less a mean, twice at most."""
    sizes = [[float(np.linalg.norm(a.outputs[key].astype(np.float64))) for key in (OUTPUT, SAMPLER)] for a, _ in pairs]
    logits, logprobs = np.array(sizes).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(2.0 * of_logits * logits / logprobs, dtype=np.float64)


def _first(rows: Sequence[BoundaryDrift]) -> list[Divergence]:
    """The first boundary above noise; later ones inherit its error."""
    row = next((candidate for candidate in rows if candidate.is_above), None)
    if row is None:
        return []
    difference = (
        f"relative difference {between(row.drift)}, {number(row.drift.estimate / row.floor)} times the noise floor"
    )
    if row.boundary == OUTPUT:
        return [Divergence("drift", row.boundary, "", f"{after_the_last(rows, {})}; {difference}")]
    if row.boundary == SAMPLER:
        said = f"of the sampled distribution, while the logits before it do not differ: {difference}"
        return [Divergence("sampler", row.boundary, "", said)]
    return [Divergence("drift", row.boundary, "", f"{difference}; what lies behind it inherits it")]


def _part(key: Boundary, a: CapturedSequence, b: CapturedSequence, *, decode: bool | None = None) -> float:
    """The relative error at all positions, or those of the completion, or of the prompt."""
    chosen = np.full(a.positions.shape, True) if decode is None else (a.positions >= a.prompt_tokens) == decode
    free = projected(np.ones((1, a.features[key]), dtype=np.float32))[0] if key == OUTPUT else None
    return relative_error(a.outputs[key][chosen], b.outputs[key][chosen], free=free) if chosen.any() else float("nan")


def _notes(train: Capture, inference: Capture, pairs: Sequence[tuple[CapturedSequence, CapturedSequence]]) -> list[str]:
    notes = [f"training kernel: {train.kernel}; inference kernel: {inference.kernel}"]
    ours, theirs = (in_order(side.outputs for side in sides) for sides in zip(*pairs, strict=True))
    for side, have, lack in (("inference", ours, theirs), ("training", theirs, ours)):
        if unseen := by_operator(key for key in have if key not in lack):
            notes.append(f"the {side} kernel has none of these, so they were not compared: {'; '.join(unseen)}")
    return [*notes, "no shares: captures can be compared, and nothing in them can be swapped", ABOVE_NOISE]
