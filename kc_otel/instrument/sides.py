"""From batches of one kernel's log-probabilities to sequences that wait for the other's, and back to batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.instrument import capture
from kc_otel.instrument.pairing import Pair, Side, content_key
from kc_otel.instrument.work import Work
from kc_otel.telemetry.streams import KernelPair

__all__ = ["paired_batch", "sides_of", "versions_of"]


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """What a side brings along besides its numbers."""

    work: Work
    attributes: Mapping[str, Scalar]
    advantages: Any


def sides_of(work: Work, rows: capture.Rows) -> Iterator[tuple[Hashable, Side]]:
    """The valid tokens of each sequence, with its key; sequences without any are left out.

    Raises:
        ValueError: If there are keys or attributes for another number of sequences.
    """
    arrays = {name: capture.on_host(data) for name, data in rows.arrays.items() if data is not None}
    total = len(rows.kept) + sum(rows.invalid.values())
    for name, given in (("key", work.keys), ("attributes", work.attributes)):
        if (
            isinstance(given, list | tuple)
            and (name == "attributes" or isinstance(given, list))
            and len(given) != total
        ):
            raise ValueError(f"{name}: {len(given)} for {total} sequences; give one for each")
    light = work.without_arrays()
    for row, index in enumerate(rows.kept):
        inside = arrays["mask"][row] != 0 if "mask" in arrays else slice(None)
        ids = arrays["token_ids"][row][inside]
        if not ids.size:
            continue
        # Rows are copied out of the batch: a view would keep the whole of it while one sequence waits.
        advantages = _advantages(arrays, row)[inside].copy() if "advantages" in arrays else None
        origin = _Origin(light, _attributes(work, index), advantages)
        yield _key(work, ids, index, total), Side(ids.copy(), arrays["logprobs"][row][inside].copy(), origin)


def versions_of(pair: Pair) -> Hashable:
    """What pairs must have in common to be measured as one batch: both kernels, weight versions and processings."""
    sampled, scored = pair.sampled.origin.work, pair.scored.origin.work
    processing = [
        None if each is None else tuple(sorted(each.items())) for each in (scored.processing[0], sampled.processing[1])
    ]
    return scored.pair.train, sampled.pair.inference, scored.weights[0], sampled.weights[1], *processing


def paired_batch(work: Work, pairs: Sequence[Pair]) -> tuple[Work, capture.Rows]:
    """Pairs of the same versions as one batch, in the trace context of `work`, the side that came last.

    The spans of the sides that waited become links. Attributes of both sides count; the sampled side's win.
    """
    sampled, scored = pairs[0].sampled.origin.work, pairs[0].scored.origin.work
    advantages = [pair.scored.origin.advantages for pair in pairs]
    arrays = {
        "train": [pair.scored.logprobs for pair in pairs],
        "inference": [pair.sampled.logprobs for pair in pairs],
        "token_ids": [pair.sampled.token_ids for pair in pairs],
        "mask": None,
        "advantages": None if any(a is None for a in advantages) else advantages,
    }
    waited = [(pair.scored if work.kind == "sampled" else pair.sampled).origin.work for pair in pairs]
    spans = (*work.links, *(span for other in waited for span in other.spans))
    links = {(span.trace_id, span.span_id): span for span in spans}
    batch = replace(
        work.without_arrays(),
        kind="compare",
        pair=KernelPair(scored.pair.train, sampled.pair.inference),
        attributes=[{**pair.scored.origin.attributes, **pair.sampled.origin.attributes} for pair in pairs],
        processing=(scored.processing[0], sampled.processing[1]),
        weights=(scored.weights[0], sampled.weights[1]),
        links=tuple(links.values()),
    )
    return batch, capture.laid_out(arrays, like="train")


def _advantages(arrays: Mapping[str, Any], row: int) -> NDArray[np.floating]:
    return np.broadcast_to(arrays["advantages"][row], arrays["logprobs"][row].shape)


def _attributes(work: Work, index: int) -> Mapping[str, Scalar]:
    if work.attributes is None:
        return {}
    return work.attributes if isinstance(work.attributes, Mapping) else work.attributes[index]


def _key(work: Work, ids: NDArray[Any], index: int, total: int) -> Hashable:
    if isinstance(work.keys, list):
        return work.keys[index]  # type: ignore[no-any-return]
    if work.keys is not None:
        return work.keys if total == 1 else (work.keys, index)
    return content_key(ids, capture.row_of(work.prompts, index))
