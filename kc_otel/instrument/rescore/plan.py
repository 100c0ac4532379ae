"""Which requests are scored together: one kernel, one processing, one weight version, and about one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from kc_otel.instrument.request import SampledRequest
from kc_otel.instrument.rescore.comparable import effective

__all__ = ["batches", "length"]


def length(request: SampledRequest) -> int:
    """Prompt and sampled tokens of a request."""
    return int(request.prompt_ids.size + request.token_ids.size)


def batches(requests: Sequence[SampledRequest], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the requests of each batch: alike, the longest first, at most `batch_tokens` when padded.

    The longest come first so that a batch that does not fit the device fails at once and not after hours. A request
    that is longer than `batch_tokens` is a batch of its own.
    """
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        groups[_alike(request)].append(index)
    for members in groups.values():
        members.sort(key=lambda index: -length(requests[index]))
        batch: list[int] = []
        for index in members:
            if batch and (len(batch) + 1) * length(requests[batch[0]]) > batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def _alike(request: SampledRequest) -> Hashable:
    return request.kernel, request.weights, tuple(sorted(effective(request.processing).items()))
