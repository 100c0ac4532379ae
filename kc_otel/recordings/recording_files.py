"""Recordings in files: reading whatever wrote them, checking what measuring requires, and writing them again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason, remedy
from kc_otel.contract.slices import LAG, LENGTH, Scalar
from kc_otel.record.measure.altered import offset_by_row
from kc_otel.record.measure.arrays import as_bool
from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.checks import LOOK, TOO_SURE, check_block, more_than_all, penalised, swapped
from kc_otel.record.measure.sampled import TOLERANCE, renormalised, saturated
from kc_otel.record.weight_versions import as_version
from kc_otel.recordings.importers.trainer_files import files_of, trainer_of, trainer_table
from kc_otel.recordings.read_table import ALIASES, ATTRIBUTES, FLOATS, MASK, LinesRead, Problems, RaggedTable, read_own
from kc_otel.recordings.recording import DENSITY, GROUPS, Recording, RecordingError, prompt_of
from kc_otel.stats.surplus import surely_surplus, sureness, surplus

_HALF_PRECISION: Final = 0.25
"""Nats by which a log-sum-exp that was rounded to bfloat16 lies below a logit of 32 to 64, at most."""
_FEW_SEQUENCES_SHARE: Final = 0.05
"""Share of sequences with a fault of their own up to which a fault of all others is told first."""


def load_recording(path: str | Path, *, columns: Mapping[str, str] | None = None) -> Recording:
    """Log-probabilities of both kernels: from a recording, or what a trainer wrote, or a folder of it.

    Recordings in .npz are padded [S, T] with a mask or lengths, or packed [N] with lengths; a row of .jsonl and
    .parquet is a sequence. `columns` maps roles to column names. A RecordingError has each kind of fault, and how often
    it occurs.
    """
    refusals = Problems()
    try:
        found = (_table(file, refusals, columns) for file in files_of([Path(path)]))
        tables = [table for table in found if table is not None]
    except OSError as error:
        raise RecordingError(str(error)) from None
    masked = refusals.counts["no_tokens"]
    if refusals.counts.keys() - {"no_tokens"}:
        refusals.first.pop("no_tokens", None)
        raise RecordingError(*refusals.all())
    if not tables:
        raise RecordingError(f"{path}: holds no sequence with a token that counts")
    for table in tables if len(tables) > 1 else ():
        if not table.trainer:  # a fault of one file is not lost among the sequences of the others
            assembled(table)
    recording = assembled(tables[0] if len(tables) == 1 else _together(str(path), tables))
    return replace(recording, masked=recording.masked + masked)


def read_file(
    path: Path, refusals: Problems, columns: Mapping[str, str] | None = None, read: LinesRead | None = None
) -> Recording | None:
    """Read the sequences of a file, None for none; those of a trainer's file are not checked yet.

    Records that cannot become one are `refusals`; a file of nothing else is a RecordingError. `read` skips known lines.
    """
    table = _table(path, refusals, columns, read)
    if table is None:
        return None
    try:
        return assembled(table, check=not table.trainer)
    except RecordingError as error:
        raise RecordingError(*error.problems, sequences=len(table.attributes)) from None


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _table(
    path: Path, refusals: Problems, columns: Mapping[str, str] | None, read: LinesRead | None = None
) -> RaggedTable | None:
    trainer = "" if columns else trainer_of(path)
    return trainer_table(trainer, path, refusals, read) if trainer else read_own(path, columns, read)


def _together(path: str, tables: Sequence[RaggedTable]) -> RaggedTable:
    """Several files as one table. Ids, advantages and logits that only some of them have are left out."""
    attributes = [_group_of_file(row, table.source) for table in tables for row in table.attributes]
    columns: dict[str, list[NDArray[Any]]] = {}
    for role in dict.fromkeys(role for table in tables for role in table.columns):
        without = sum(len(table.attributes) for table in tables if role not in table.columns)
        if role == "versions" and without:
            said = f"{without:,} of {len(attributes):,} sequences have no weight_versions; write the column in every"
            raise RecordingError(f"{path}: {said} file, or give the files one by one")
        # Without a mask every token counts; without truncation the mass that was kept is 1.
        fill = np.ones_like if role.startswith(MASK) else np.zeros_like
        if not without or role.startswith(MASK) or role in {"train_kept", "inference_kept"}:
            rows = (table.columns.get(role) or map(fill, table.columns["train"]) for table in tables)
            columns[role] = list(chain.from_iterable(rows))
    places = [f"{table.source}: {table.place(row)}" for table in tables for row in range(len(table.attributes))]
    names = {role: name for table in tables for role, name in table.names.items()}
    unread = {name: why for table in tables for name, why in table.unread.items()}
    return RaggedTable(path, columns, names, attributes, places.__getitem__, unread)


def _group_of_file(attributes: Mapping[str, Scalar], file: str) -> Mapping[str, Scalar]:
    """Name group numbers after their file, where they may begin anew in each; names and uids are those of all files."""
    numbers = {
        name: value for name in GROUPS if name != "uid" and isinstance(value := attributes.get(name), int | float)
    }
    return {**attributes, **{name: f"{file}: {value}" for name, value in numbers.items() if not math.isnan(value)}}


def assembled(table: RaggedTable, *, check: bool = True) -> Recording:
    """The recording that a table holds; a RecordingError with each kind of fault, its first place and a count.

    Without a check of the numbers, their shapes, masks and attributes are checked alone.
    """
    problems = Problems(table.source)
    table = replace(table, attributes=[_with_steps(table, row, problems) for row in range(len(table.attributes))])
    lengths = np.array([len(row) for row in table.columns.get("train", ())], np.int64)
    rows = _packed(table, lengths, problems)
    if not lengths.sum():
        problems.add("has no token; a recording has at least one sequence with one token")
    if problems.all():
        raise RecordingError(*problems.all())
    masks = {role: rows.pop(role) for role in list(rows) if role.startswith(MASK)}
    named_masks = " and ".join(table.names.get(role, role) for role in masks)
    kept: NDArray[np.bool_] | None = None
    if masks:
        try:
            kept = np.logical_and.reduce([as_bool(values, whole=True) for values in masks.values()])
        except ValueError as error:
            raise RecordingError(f"{table.source}: {named_masks}{str(error).removeprefix('mask')}") from None
        lengths = np.add.reduceat(kept, np.cumsum(lengths) - lengths, dtype=np.int64)
    given = {role: values if kept is None else values[kept] for role, values in rows.items()}
    positions = None if kept is None else _positions(kept, lengths)
    used = lengths > 0
    if not used.any():
        raise RecordingError(f"{table.source}: {named_masks} leaves no token of any row; 1 means that a token counts")
    numbers = np.flatnonzero(used)
    lengths = lengths[used]
    if check:
        _check(table, given, lengths, numbers, problems)
    if problems.all():
        raise RecordingError(*problems.all())
    given.pop("inference_kept", None)
    columns: dict[str, Any] = given | {
        role: given[role].astype(np.int64) for role in ("token_ids", "versions") if role in given
    }
    return Recording(
        lengths=lengths,
        attributes=tuple(
            {LENGTH: length, **table.attributes[row]}
            for row, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
        ),
        positions=positions,
        source=table.source,
        masked=int((~used).sum()),
        unread=table.unread,
        **columns,
    )


def _with_steps(table: RaggedTable, row: int, problems: Problems) -> dict[str, Scalar]:
    """A row's attributes, with the steps of weights and the lag as whole numbers, however the file writes them."""
    found = dict(table.attributes[row])
    for name in found.keys() & {"train_weights", "inference_weights", LAG}:
        given = found.pop(name)
        with suppress(ValueError):
            if given != given:  # noqa: PLR0124 - NaN, as arrays write that nothing is known
                continue
            version = None if isinstance(given, bool) else as_version(given)
            if version is not None and (name != LAG or (isinstance(version, int) and version >= 0)):
                found[name] = version
                continue
        said = "the number of versions behind, 0 or more" if name == LAG else "a step, a whole number, or a name"
        problems.add(f"{table.place(row)}: {name}: {given!r} is not {said}", kind=name)
    return found


def _packed(table: RaggedTable, lengths: NDArray[np.int64], problems: Problems) -> dict[str, NDArray[Any]]:
    """Every role's numbers, one per token of all rows; a row's single advantage is repeated over its tokens."""
    found = {}
    first = table.names.get("train", "train")
    for role, rows in table.columns.items():
        values = np.concatenate(rows) if rows else np.empty(0)
        own = np.array([len(row) for row in rows], np.int64)
        if role == "advantages":
            values = np.repeat(values, np.repeat(np.where(own == 1, lengths, 1), own))
            own = np.where(own == 1, lengths, own)
        if (differing := np.flatnonzero(own != lengths)).size:
            row = int(differing[0])
            problems.add(
                f"{table.place(row)}: {table.names.get(role, role)}: has {own[row]} numbers where {first} has "
                f"{lengths[row]}; both sides score the same tokens",
                times=differing.size,
            )
        found[role] = values.astype(np.float64, copy=False) if role in FLOATS else values
    if (empty := np.flatnonzero(lengths == 0)).size:
        problems.add(f"{table.place(int(empty[0]))}: {first}: is empty; leave the row out", times=empty.size)
    return found


def _positions(kept: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Positions of the tokens that are kept, so many of each row; None where those of each row follow each other."""
    at, ends = np.flatnonzero(kept), np.cumsum(lengths)
    firsts = np.repeat(at[(ends - lengths)[lengths > 0]], lengths[lengths > 0])
    positions = at - firsts
    holes = np.diff(positions, prepend=-1) > 1
    return positions if holes.any() else None


def _check(
    table: RaggedTable,
    given: dict[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.intp],
    problems: Problems,
) -> None:
    """Check the tokens that count; `numbers` are their rows in the file."""
    starts = np.cumsum(lengths) - lengths
    row_of = np.repeat(np.arange(lengths.size), lengths)

    def note(role: str, wrong: NDArray[np.bool_], what: str) -> None:
        """Tell of the first token that is wrong, and in how many rows there is one."""
        if wrong.any():
            place, name = int(wrong.argmax()), table.names.get(role, role)
            row = row_of[place]
            at, value = table.place(int(numbers[row])), given[role][place]
            problems.add(
                f"{at}: {name}: token {place - starts[row]} is {value:g}; {what}", times=np.unique(row_of[wrong]).size
            )

    density = all(table.attributes[row].get(DENSITY) is True for row in numbers)
    of_rows = (np.arange(lengths.size), starts.astype(np.intp), lengths.astype(np.intp))
    sides = " and ".join(table.names.get(side, side) for side in ("train", "inference"))
    if not density and (wrong := offset_by_row(Block(*of_rows, given["train"], given["inference"]))):
        problems.add(f"INVALID INPUT, not_logprobs: {sides}: {wrong[0].of(lengths.size)}. {remedy('not_logprobs')}")
        return
    for role in (name for name in FLOATS if name in given):
        note(role, np.isnan(given[role]), "mask the token, leave the row out, or find out why")
        note(role, *_impossible(role, given[role], density=density))
    if problems.all():
        return
    _renormalise(given, note)
    if problems.all():
        return
    block = Block(*of_rows, given["train"], given["inference"])
    checked = check_block(block, density=density)
    sound = checked.codes == InvalidReason.VALID
    tokens = np.repeat(sound, lengths)
    roles: tuple[str, ...] = ("train", "inference", "token_ids")
    parts = {role: given[role][tokens] for role in roles if role in given}
    said = (
        _not_sampled(table, parts, lengths[sound], numbers[sound], block.log_w[tokens])
        if not density and 2 * sound.sum() > sound.size
        else None
    )
    found = []
    codes, often = np.unique(checked.codes[~sound], return_counts=True)
    for code in codes[np.argsort(-often, kind="stable")]:
        rows, reason = np.flatnonzero(checked.codes == code), InvalidReason(code)
        what = f"{checked.why[reason]}. " if reason in checked.why else ""
        place = table.place(int(numbers[rows[0]]))
        found.append((f"{reason.name.lower()}: {place}: {sides}: {what}{remedy(reason.name.lower())}", rows.size))
    if said:  # what nearly all rows show comes before what few do, unless the few have an exact cause
        few = np.count_nonzero(~sound) < _FEW_SEQUENCES_SHARE * sound.size and not checked.why
        found.insert(0 if few else len(found), (f"{said[0]}: {sides}: {said[1]}. {remedy(said[0])}", 1))
    for words, times in found:
        problems.add(f"INVALID INPUT, {words}", times=times)


def _not_sampled(
    table: RaggedTable,
    given: dict[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.intp],
    log_w: NDArray[Any],
) -> tuple[str, str] | None:
    """Return the reason, and what was found, where the tokens together are no sample of the inference side."""
    starts = np.cumsum(lengths) - lengths
    if "token_ids" in given:
        few = np.cumsum(lengths) <= max(LOOK, lengths[0])
        train, inference, ids = (given[role][: lengths[few].sum()] for role in ("train", "inference", "token_ids"))
        if said := penalised(train, inference, ids, lengths[few]):
            return "penalised_sampling", said
    prompts = [prompt_of(table.attributes[row]) for row in numbers]
    first = ("token_ids" in given and None not in prompts) and (given["inference"][starts], given["token_ids"][starts])
    if first and (said := more_than_all(*first, prompts)):
        return "not_sampled", said
    exact = saturated(log_w)
    if surely_surplus(surplus(np.expm1(exact))):
        said = f"the mean of P/Q over {log_w.size:,} tokens is {np.exp(exact).mean():.3g}"
        return "not_sampled", swapped(exact.astype(np.float64)) or said
    return ("not_sampled", TOO_SURE) if surely_surplus(sureness(given["inference"])) else None


def _impossible(role: str, values: NDArray[np.float64], *, density: bool) -> tuple[NDArray[np.bool_], str]:
    """Return a mask of values that are impossible in their column, and the reason."""
    if role == "advantages":
        return np.isinf(values), "an advantage is a finite number"
    if role == "versions":
        return values % 1 != 0, "the weights' version of a token is a step, an integer"
    if density:
        return values == np.inf, "a log-density is finite"
    over = float(np.max(values, initial=0.0, where=np.isfinite(values)))
    if role in {"train", "inference"} and over == 1.0 and (values[values > TOLERANCE] == over).all():
        return np.zeros(values.shape, dtype=np.bool_), ""  # a placeholder, for `check_block` to tell
    if role in {"train", "inference"} and over <= _HALF_PRECISION:
        why = "above 0 by the rounding of a log-sum-exp in half precision; compute the log-softmax in float32"
        return values > TOLERANCE, why
    return values > TOLERANCE, (
        "a log-probability is at most 0: is it a logit or a probability? A loss is positive, and rows of log-densities "
        "say density: true"
    )


def _renormalise(given: dict[str, NDArray[Any]], note: Callable[[str, NDArray[np.bool_], str], None]) -> None:
    """Put both sides' log-probabilities over the tokens that truncation kept in the place of those from before it."""
    for side in ("train", "inference"):
        if (kept := given.get(f"{side}_kept")) is not None:
            given[side] = renormalised(given[side], kept)
            note(side, np.isnan(given[side]), "the kernel has no mass on the tokens that were kept")
            note(side, given[side] > TOLERANCE, f"over the mass in {side}_kept_logprobs: was the token kept?")


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording to .npz, packed."""
    where = Path(path)
    if where.suffix.lower() != ".npz":
        raise RecordingError(f"{where}: recordings are written as .npz; end the name in that")
    if recording.train_kept is not None:  # a file has log-probabilities from before truncation
        recording = replace(recording, train=recording.train + recording.train_kept)
    written: dict[str, Any] = {
        names[0]: values for role, names in ALIASES.items() if (values := getattr(recording, role, None)) is not None
    }
    if any(recording.attributes):
        written[ATTRIBUTES] = np.array([json.dumps(dict(attribute)) for attribute in recording.attributes])
    with where.open("wb") as file:
        np.savez_compressed(file, **written)
