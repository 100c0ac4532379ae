"""From a file's rows to a recording: masks are applied, and everything is checked that has to hold before measuring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import as_bool
from kc_otel.record.measure.checks import InvalidReason, check_block, difference
from kc_otel.record.measure.packing import Block
from kc_otel.record.measure.reasons import remedy
from kc_otel.record.measure.truncation import renormalised
from kc_otel.recordings.columns import FLOATS, LOGITS
from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.rows import Problems, Ragged, RaggedTable

__all__ = ["assembled"]

_TOLERANCE: Final = 1e-3
"""As in `measure.checks`: how far above 0 a log-probability may be."""

_REMEDY: Final = {
    InvalidReason.IMPOSSIBLE_TOKEN: "the inference kernel gives probability 0 to a token that it sampled; record the "
    "log-probabilities of the distribution that was sampled from",
    InvalidReason.ZERO_FILLED: "one side is 0 throughout, as an unwritten buffer is; record it, or leave the row out",
    InvalidReason.ONE_TOKEN_SHIFT: "one side is a token ahead of the other; align both to the tokens they score",
}
"""Where a recording's reader needs other words than a program's log."""


def assembled(table: RaggedTable) -> Recording:
    """The recording that a table holds.

    Raises:
        RecordingError: If something is wrong with it; every problem at once, up to a cap.
    """
    problems = Problems(table.source)
    ragged = {role: part for role, part in table.ragged.items() if role != "mask"}
    if "train" not in ragged or "inference" not in ragged:
        ragged |= _from_logits(table, ragged, problems)
    lengths = ragged["train"].lengths
    rows = _same_lengths(table, ragged, problems)
    if not lengths.size or not lengths.sum():
        problems.add("has no token; a recording has at least one sequence with one token")
    if problems.all():
        raise RecordingError(*problems.all())
    try:
        kept, lengths = _mask(table, lengths)
    except ValueError as error:
        raise RecordingError(f"{table.source}: {table.names['mask']}{str(error).removeprefix('mask')}") from None
    given = {role: rows[role] if kept is None else rows[role][kept] for role in rows}
    used = lengths > 0
    if not used.any():
        raise RecordingError(
            f"{table.source}: {table.names['mask']} leaves no token of any row; 1 means that a token counts"
        )
    numbers = np.flatnonzero(used)
    lengths = lengths[used]
    _check(table, given, lengths, numbers, problems)
    if problems.all():
        raise RecordingError(*problems.all())
    return Recording(
        train=given["train"],
        inference=given["inference"],
        lengths=lengths,
        attributes=tuple(table.attributes[row] for row in numbers),
        token_ids=given["token_ids"].astype(np.int64) if "token_ids" in given else None,
        advantages=given.get("advantages"),
        train_at_rollout=given.get("train_at_rollout"),
        policy=given.get("policy"),
        train_kept=given.get("train_kept"),
        versions=given["versions"].astype(np.int64) if "versions" in given else None,
        source=table.source,
        train_logits=given.get("train_logits"),
        inference_logits=given.get("inference_logits"),
        masked=tuple(table.attributes[row] for row in np.flatnonzero(~used)),
        unread=table.unread,
    )


def _same_lengths(table: RaggedTable, ragged: dict[str, Ragged], problems: Problems) -> dict[str, NDArray[Any]]:
    """Every role's numbers, one per token; a row's single advantage is repeated over its tokens."""
    lengths = ragged["train"].lengths
    found = {}
    for role, part in {**ragged, **({"mask": table.ragged["mask"]} if "mask" in table.ragged else {})}.items():
        values = part.values.astype(np.float64, copy=False) if role in FLOATS else part.values
        if role == "advantages" and (part.lengths == 1).all():
            values, differing = np.repeat(values, lengths), np.zeros(0, dtype=np.intp)
        else:
            differing = np.flatnonzero(part.lengths != lengths)
        for row in differing[: problems.cap]:
            name, other = table.names.get(role, role), table.names.get("train", "train_logits")
            problems.add(
                f"{table.place(int(row))}: {name}: has {part.lengths[row]} numbers where {other} has {lengths[row]}; "
                f"both sides score the same tokens"
            )
        if differing.size > problems.cap:
            problems.add(f"{table.names.get(role, role)}: other lengths differ", times=differing.size - problems.cap)
        if role != "mask":
            found[role] = values
    empty = np.flatnonzero(lengths == 0)
    for row in empty[: problems.cap]:
        problems.add(
            f"{table.place(int(row))}: {table.names.get('train', 'train_logits')}: is empty; leave the row out"
        )
    return found


def _mask(table: RaggedTable, lengths: NDArray[np.int64]) -> tuple[NDArray[np.bool_] | None, NDArray[np.int64]]:
    """Which tokens count, None for all, and how many of each row."""
    if "mask" not in table.ragged:
        return None, lengths
    kept = as_bool(table.ragged["mask"].values)
    return kept, np.add.reduceat(kept, np.cumsum(lengths) - lengths, dtype=np.int64)


def _from_logits(table: RaggedTable, ragged: dict[str, Ragged], problems: Problems) -> dict[str, Ragged]:
    """The sampled tokens' log-probabilities, where a file has logits and tokens in their place."""
    tokens = ragged["token_ids"].values.astype(np.intp)
    found = {}
    for side, role in zip(("train", "inference"), LOGITS, strict=True):
        logits = ragged[role].values
        if tokens.shape != logits.shape[:1] or tokens.min(initial=0) < 0 or tokens.max(initial=0) >= logits.shape[1]:
            problems.add(f"{table.names['token_ids']}: do not index the {logits.shape} numbers of {table.names[role]}")
            raise RecordingError(*problems.all())
        values = np.empty(tokens.size)
        step = max(1, (1 << 20) // logits.shape[1])
        for first in range(0, tokens.size, step):
            part = logits[first : first + step].astype(np.float64)
            part -= part.max(axis=1, keepdims=True)
            chosen = part[np.arange(part.shape[0]), tokens[first : first + step]]
            values[first : first + step] = chosen - np.log(np.exp(part).sum(axis=1))
        if side not in ragged:
            found[side] = Ragged(values, ragged[role].lengths)
    return found


def _check(
    table: RaggedTable,
    given: dict[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.intp],
    problems: Problems,
) -> None:
    """What has to hold of the tokens that count; `numbers` are their rows in the file."""
    starts = np.cumsum(lengths) - lengths
    row_of = np.repeat(np.arange(lengths.size), lengths)

    def note(role: str, wrong: NDArray[np.bool_], what: str) -> None:
        """One sentence per row, about its first token that is wrong."""
        rows, first = np.unique(row_of[wrong], return_index=True)
        places = np.flatnonzero(wrong)[first]
        name = table.names.get(role, role)
        for row, place in zip(rows[: problems.cap], places[: problems.cap], strict=True):
            at, value = table.place(int(numbers[row])), given[role][place]
            problems.add(f"{at}: {name}: token {place - starts[row]} is {value:g}; {what}")
        if rows.size > problems.cap:
            problems.add(f"{name}: other rows", times=rows.size - problems.cap)

    for role in (each for each in FLOATS if each in given):
        note(role, np.isnan(given[role]), "mask the token, leave the row out, or find out why")
        note(role, *_impossible(role, given[role]))
    if problems.all():
        return
    _renormalise(given, note)
    if problems.all():
        return
    block = Block(
        np.arange(lengths.size), starts.astype(np.intp), lengths.astype(np.intp), given["train"], given["inference"]
    )
    codes = check_block(block, difference(block))
    sides = " and ".join(table.names.get(side, side) for side in ("train", "inference"))
    for code in np.unique(codes[codes != InvalidReason.VALID]):
        rows = np.flatnonzero(codes == code)
        others = f" and {rows.size - 1:,} more" if rows.size > 1 else ""
        problems.add(f"{table.place(int(numbers[rows[0]]))}{others}: {sides}: {_words(InvalidReason(code))}")


def _impossible(role: str, values: NDArray[np.float64]) -> tuple[NDArray[np.bool_], str]:
    """Which numbers cannot be what their column says, and why."""
    if role == "advantages":
        return np.isinf(values), "an advantage is a finite number"
    if role == "versions":
        return values % 1 != 0, "the weights' version of a token is a step, an integer"
    return values > _TOLERANCE, "a log-probability is at most 0: is it a logit or a probability?"


def _renormalise(given: dict[str, NDArray[Any]], note: Callable[[str, NDArray[np.bool_], str], None]) -> None:
    """Put both sides' log-probabilities over the tokens that truncation kept in the place of those from before it."""
    for side in ("train", "inference"):
        if (kept := given.get(f"{side}_kept")) is not None:
            given[side] = renormalised(given[side], kept)
            note(side, np.isnan(given[side]), "the kernel has no mass on the tokens that were kept")
            note(side, given[side] > _TOLERANCE, f"over the mass in {side}_kept_logprobs: was the token kept?")


def _words(reason: InvalidReason) -> str:
    return _REMEDY.get(reason) or remedy(reason.name.lower())
