"""Logits compared where the tensors are: by the kernel of `logit_kernel` where Triton is, by torch where it is not.

Everything here enqueues work and returns tensors; nothing waits for the device. The result of `logit_drift` crosses to
the host in one copy.

Shards of a vocabulary, of tensor-parallel ranks or of a head that is multiplied piece by piece, are measured in two
steps: the results of `first_pass` are merged (`merged`), and those of `second_pass` are added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.record.measure.logit_passes import NO_KEY, FirstPass, LogitCounts, LogitRows, logit_of

with extra("torch", "comparing logits on a device"):
    import torch

__all__ = ["DeviceDrift", "LogitCounts", "TopK", "device_drift", "hidden_drift", "sharded_drift"]

_SATURATION: Final = 64.0
_BLOCK: Final = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The k most likely tokens of both sides, most likely first, of equal ones the earlier first.

    Attributes:
        tokens: int64 [rows, 2, k].
        logprobs: float64 [rows, 2, k].
        tail: Mass of all others, float64 [rows, 2]: summed, not 1 less that of the k.
    """

    tokens: Any
    logprobs: Any
    tail: Any


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDrift:
    """`LogitDrift` on the device.

    Attributes:
        values: float64 [rows, 7]; NaN in rows that are not valid.
        logprobs: Of the targets, both sides, float64 [rows, 2]; None without targets.
        top: None where none were asked for.
    """

    values: Any
    logprobs: Any
    top: TopK | None


def device_drift(
    train: Any,
    inference: Any,
    *,
    at: tuple[Any, ...] | None = None,
    targets: Any = None,
    top: int = 0,
    counters: LogitCounts | None = None,
) -> DeviceDrift:
    """Compare logits, in one launch where Triton is.

    Args:
        train: [..., vocab], of any floating type and strides.
        inference: The same of the other kernel, on the same device; its type may differ.
        at: Rows, one int64 tensor [rows] for each leading axis; None for all, in order.
        targets: A token of each row, int64 [rows]; one outside of the vocabulary has log-probabilities -inf.
        top: How many of the most likely tokens are wanted, of logits that are not float64.
        counters: Incremented by every valid row, and by its target's log ratio where that is a number.
    """
    pair = LogitRows.of(train, inference, at, targets, top)
    if counters is not None and counters.group.shape != pair.at[0].shape:
        raise ValueError(f"counters: groups of {counters.group.numel()} rows for {pair.at[0].numel()}")
    launched = pair.both_passes(counters)
    if launched is not None:
        return _finished(*launched, top)
    found = pair.first_pass()
    drift = _finished(found, pair.second_pass(found), top)
    if counters is not None:
        _count(counters, drift)
    return drift


def hidden_drift(
    train: tuple[Any, Any],
    inference: tuple[Any, Any],
    *,
    targets: Any = None,
    top: int = 0,
    rows: int | None = None,
) -> DeviceDrift:
    """Compare what two heads make of hidden states, without logits of more than some rows at a time.

    Args:
        train: Hidden states [tokens, hidden], and the head [vocab, hidden], of the training kernel.
        inference: Those of the inference kernel, on the same device.
        targets: As in `device_drift`.
        top: As in `device_drift`.
        rows: How many rows' logits exist at a time; None for 4 Mi logits a side.
    """
    tokens, vocab = train[0].shape[0], train[1].shape[0]
    step = rows or max(1, _BLOCK // vocab)
    buffers = [h.new_empty((min(step, tokens), vocab)) for h, _ in (train, inference)]
    parts = []
    for begin in range(0, tokens, step):
        size = min(step, tokens - begin)
        for (h, head), buffer in zip((train, inference), buffers, strict=True):
            torch.mm(h[begin : begin + size].detach(), head.detach().T, out=buffer[:size])
        y = None if targets is None else targets[begin : begin + size]
        parts.append(device_drift(*(buffer[:size] for buffer in buffers), targets=y, top=top))
    if not parts:
        return device_drift(*buffers, targets=targets, top=top)
    kept = None
    if top:
        tops = [part.top for part in parts if part.top is not None]
        kept = TopK(*(torch.cat([getattr(shard, name) for shard in tops]) for name in ("tokens", "logprobs", "tail")))
    logprobs = None if targets is None else torch.cat([part.logprobs for part in parts])
    return DeviceDrift(torch.cat([part.values for part in parts]), logprobs, kept)


def sharded_drift(
    train: Any, inference: Any, *, group: Any = None, before: int | None = None, targets: Any = None, top: int = 0
) -> DeviceDrift:
    """Compare logits of which each rank of a process group holds a part of the vocabulary; each gets the result.

    Two exchanges, of 11 and of 7 numbers a row and rank, and of 2 `top` keys where those are wanted.

    Args:
        train: This rank's logits [..., part].
        inference: The same of the other kernel.
        group: Of `torch.distributed`; None for the default one.
        before: Tokens of the vocabulary in the ranks before this one; None where all have as many.
        targets: Tokens of the whole vocabulary, int64 [rows].
        top: As in `device_drift`.
    """
    from torch import distributed  # noqa: PLC0415 - not in every build

    ranks = distributed.get_world_size(group)
    if before is None:
        before = distributed.get_rank(group) * int(train.shape[-1])
    pair = LogitRows.of(train, inference, None, targets, top, before)

    def gathered(own: Any) -> list[Any]:
        if own is None:
            return [None] * ranks
        out = [torch.empty_like(own) for _ in range(ranks)]
        distributed.all_gather(out, own.contiguous(), group=group)
        return out

    own = pair.first_pass()
    found = merged(
        [FirstPass(*shard) for shard in zip(*map(gathered, (own.stats, own.of_targets, own.best)), strict=True)]
    )
    sums = pair.second_pass(found)
    distributed.all_reduce(sums, group=group)
    return _finished(found, sums, top)


def merged(parts: list[FirstPass]) -> FirstPass:
    """Merge the first passes over all shards into that of one reading of the whole vocabulary."""
    stats = torch.stack([part.stats for part in parts])
    tops, masses = stats[..., 0:2], stats[..., 2:4]
    highest = tops.amax(0)
    weight = torch.where(tops == highest, 1.0, (tops - highest).exp())
    mass = torch.where(masses > 0, masses * weight, 0.0).sum(0)
    first = torch.where(tops == highest, stats[..., 6:8], math.inf).amin(0)
    ends = stats[..., 4:5].amax(0), stats[..., 5:6].amin(0)
    best = None
    if parts[0].best is not None:
        lanes = parts[0].best.shape[-1]
        best = torch.cat([part.best for part in parts], -1).topk(lanes, -1).values
    return FirstPass(
        torch.cat([highest, mass, *ends, first, stats[..., 8:9].amax(0)], -1),
        None if parts[0].of_targets is None else torch.stack([part.of_targets for part in parts]).amax(0),
        best,
    )


def _finished(found: FirstPass, sums: Any, top: int) -> DeviceDrift:
    """The quantities, float64, from what both passes left."""
    stats = found.stats
    tops, masses = stats[:, 0:2], stats[:, 2:4]
    valid = tops.isfinite().all(1) & (stats[:, 8] == 0)
    distance, kl_pq, kl_qp, js, entropy = sums.T[:5]
    limits = {0: _SATURATION, 1: 1.0, 2: _SATURATION, 3: _SATURATION, 4: math.log(2.0), 5: 1.0}
    half_range = (stats[:, 4] - stats[:, 5]) / 2
    columns = [half_range, distance / 2, kl_pq, kl_qp, js, (stats[:, 6] != stats[:, 7]).double()]
    columns = [column.clip(0.0, limits[k]) for k, column in enumerate(columns)]
    values = torch.stack([*columns, entropy.clip(-_SATURATION, _SATURATION)], 1)
    log_masses = masses.log()
    kept = None
    if found.best is not None:
        keys = found.best.topk(top, -1).values
        none = keys == NO_KEY
        tokens = torch.where(none, -1, 0x7FFFFFFF - (keys & 0xFFFFFFFF))
        logprobs = logit_of(keys).double() - tops[..., None] - log_masses[..., None]
        kept = TopK(tokens, torch.where(none, -math.inf, logprobs), sums[:, 5:7])
    logprobs = None if found.of_targets is None else found.of_targets - tops - log_masses
    return DeviceDrift(torch.where(valid[:, None], values, math.nan), logprobs, kept)


def _count(counters: LogitCounts, drift: DeviceDrift) -> None:
    """Count in torch, as the kernel does."""
    valid = ~drift.values[:, 0].isnan()
    group = counters.group[valid]
    for column in range(7):
        value = drift.values[valid, column].float().contiguous()
        cell = torch.searchsorted(counters.edges, value, right=True)
        counters.counts[:, column].index_put_((group, cell), torch.ones_like(cell), accumulate=True)
    if drift.logprobs is not None:
        log_w = (drift.logprobs[:, 0] - drift.logprobs[:, 1]).float()
        known = valid & ~log_w.isnan()
        cell = torch.searchsorted(counters.log_edges, log_w[known].clip(-_SATURATION, 16.0), right=True)
        counters.log_counts.index_put_((counters.group[known], cell), torch.ones_like(cell), accumulate=True)
