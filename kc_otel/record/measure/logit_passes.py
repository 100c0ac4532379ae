"""The two readings of logits that `logit_device` is made of, by a Triton kernel or, where that cannot run, by torch.

By torch a few rows at a time are worked on, in float32 or, where a side is, float64. A kernel that fails is said once,
and not tried again in this process.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from kc_otel._extras import MissingExtraError, extra
from kc_otel.record.measure.arrays import as_host

with extra("torch", "comparing logits on a device"):
    import torch

__all__ = ["NO_KEY", "FirstPass", "LogitCounts", "LogitRows", "by_kernel", "logit_of"]

NO_KEY: Final = -(1 << 63)
"""Of a place among the k largest that a small vocabulary leaves empty."""
_LANES: Final = 1024
_BLOCK: Final = 1 << 22
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LogitCounts:
    """Histograms that grow on the device, one for each group of rows and quantity.

    Attributes:
        group: LogitCounts of each row, int64 [rows].
        edges: Edges of the buckets, ascending, float32 [size], as `Partition.edges`.
        log_edges: Those of the log ratio's cells, float32 [log_size].
        counts: int64 [groups, 7, size + 1], of `LOGITS`.
        log_counts: int64 [groups, log_size + 1], of the targets' log ratios.
    """

    group: Any
    edges: Any
    log_edges: Any
    counts: Any
    log_counts: Any

    @classmethod
    def empty(cls, group: Any, groups: int, edges: Any, log_edges: Any, device: Any) -> LogitCounts:
        """LogitCounts at zero, of so many groups; arrays may be NumPy's."""
        shapes = (groups, 7, edges.size + 1), (groups, log_edges.size + 1)
        rows, *lines = (torch.as_tensor(array, device=device) for array in (group, edges, log_edges))
        return cls(rows.long(), *lines, *(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))

    def by_slice(self, members: Any) -> Any:
        """`counts` of each slice, int64 NumPy [slices, 7, size + 1], given `Groups.members`."""
        counts = as_host(self.counts)
        return (members.T.astype(counts.dtype) @ counts.reshape(counts.shape[0], -1)).reshape(-1, *counts.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class FirstPass:
    """Result of the first reading of the logits; see `logit_kernel.FIRST`.

    Attributes:
        stats: float64 [rows, 9].
        of_targets: Logits of the targets, float64 [rows, 2]; -inf where they are in another shard; None without.
        best: Keys of the largest logits, int64 [rows, 2, lanes]; None without `top`.
    """

    stats: Any
    of_targets: Any
    best: Any


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """Rows of logits to compare; see `device_drift` for what is not said here.

    Attributes:
        at: Index of each row, one int64 tensor [rows] for each leading axis.
        before: Tokens of the vocabulary in the shards before this one.
    """

    train: Any
    inference: Any
    at: tuple[Any, ...]
    targets: Any
    top: int
    before: int

    @classmethod
    def of(cls, train: Any, inference: Any, at: Any, targets: Any, top: int, before: int = 0) -> LogitRows:
        """The pair, checked.

        Raises:
            ValueError: If shapes or devices differ, or more is asked for than there is.
        """
        shape = tuple(train.shape)
        if shape != tuple(inference.shape) or len(shape) < 2 or not shape[-1]:
            raise ValueError(f"inference: shape {tuple(inference.shape)} is not train's {shape}, or not [..., vocab]")
        if train.device != inference.device:
            raise ValueError(f"inference: on {inference.device}, but train is on {train.device}")
        if train.is_complex() or inference.is_complex():
            raise ValueError("logits: complex numbers; pass real ones")
        if top and torch.float64 in (train.dtype, inference.dtype):
            raise ValueError("top: there is none of float64 logits; pass them as float32")
        if at is None:
            rest, at = torch.arange(math.prod(shape[:-1]), device=train.device), ()
            for size in reversed(shape[:-1]):  # not unravel_index, which waits for the device
                at, rest = (rest % max(size, 1), *at), rest // max(size, 1)
        if targets is not None:
            targets = torch.as_tensor(targets, device=train.device).reshape(-1).long()
            if targets.shape != at[0].shape:
                raise ValueError(f"targets: {targets.numel()} for {at[0].numel()} rows")
        return cls(train.detach(), inference.detach(), tuple(at), targets, top, before)

    def both_passes(self, counters: LogitCounts | None) -> tuple[FirstPass, Any] | None:
        """Both in one launch, and the rows counted; None where there is no kernel."""
        return self._launched(None, counters) if by_kernel(self.train, self.inference) else None

    def first_pass(self) -> FirstPass:
        """The first reading."""
        launched = self._launched(None, measure=False) if by_kernel(self.train, self.inference) else None
        if launched is not None:
            return launched[0]
        parts = [self._first(*block) for block in self._blocks()]
        columns = zip(*((part.stats, part.of_targets, part.best) for part in parts), strict=True)
        return FirstPass(*(None if column[0] is None else torch.cat(column) for column in columns))

    def second_pass(self, found: FirstPass) -> Any:
        """The second reading, float64 [rows, 7], given what the first left of the whole vocabulary."""
        launched = self._launched(found) if by_kernel(self.train, self.inference) else None
        if launched is not None:
            return launched[1]
        return torch.cat([self._second(*block, found) for block in self._blocks()])

    def _launched(
        self, found: FirstPass | None, counters: LogitCounts | None = None, *, measure: bool = True
    ) -> tuple[FirstPass, Any] | None:
        try:
            return self._launch(found, counters, measure=measure)
        except Exception:  # noqa: BLE001 - a kernel that cannot be built here must not fail its caller
            _failed.append(True)
            _log.warning("logits are compared by torch: the Triton kernel failed", exc_info=True)
            return None

    def _launch(self, found: FirstPass | None, counters: LogitCounts | None, *, measure: bool) -> tuple[FirstPass, Any]:
        rows, device, sides = self.at[0].numel(), self.train.device, (self.train, self.inference)

        def doubles(columns: int) -> Any:
            return torch.full((rows, columns), -math.inf, dtype=torch.float64, device=device)

        lanes = 1 << (self.top - 1).bit_length() if self.top else 0
        scan, sums = found is None, doubles(7)
        if found is None:
            best = torch.empty((rows, 2, lanes), dtype=torch.int64, device=device) if lanes else None
            found = FirstPass(doubles(9), None if self.targets is None else doubles(2), best)
        begins = [sum(axis * step for axis, step in zip(self.at, z.stride()[:-1], strict=True)) for z in sides]
        vocab, ignored = self.train.shape[-1], found.stats
        counted = (ignored, 0, ignored, 0, ignored, ignored, ignored)
        if counters is not None:
            counted = (
                counters.edges,
                counters.edges.numel(),
                counters.log_edges,
                counters.log_edges.numel(),
                counters.group,
                counters.counts,
                counters.log_counts,
            )
        with torch.cuda.device_of(self.train):  # Triton launches on the current device
            if rows:
                _kernel().drift_kernel[(rows,)](
                    *sides,
                    *begins,
                    *(z.stride(-1) for z in sides),
                    vocab,
                    self.before,
                    ignored if self.targets is None else self.targets,
                    ignored if found.of_targets is None else found.of_targets,
                    found.stats,
                    sums,
                    ignored if found.best is None else found.best,
                    self.top,
                    *counted,
                    SCAN=scan,
                    MEASURE=measure,
                    TARGETS=scan and self.targets is not None,
                    TOP=lanes,
                    COUNT=counters is not None,
                    ALIGNED=all(step % 8 == 0 for z in sides for step in z.stride()[:-1]),
                    BLOCK=min(_LANES, 1 << max(vocab - 1, 15).bit_length()),
                    num_warps=8,
                )
        return found, sums

    def _blocks(self) -> list[tuple[Any, Any, slice]]:
        """A few rows of both sides at a time."""
        rows = self.at[0].numel()
        # A dozen arrays of a block's size exist at a time: this keeps them under a tenth of the logits.
        step = max(1, min(rows // 128, _BLOCK // self.train.shape[-1]))
        return [self._read(slice(first, min(first + step, rows))) for first in range(0, max(rows, 1), step)]

    def _read(self, rows: slice) -> tuple[Any, Any, slice]:
        part = tuple(axis[rows] for axis in self.at)
        wide = torch.float64 if torch.float64 in (self.train.dtype, self.inference.dtype) else torch.float32
        return self.train[part].to(wide), self.inference[part].to(wide), rows

    def _first(self, z_p: Any, z_q: Any, rows: slice) -> FirstPass:
        tops = torch.stack([z_p.amax(1), z_q.amax(1)], 1)
        tops = torch.where(tops.isnan(), -math.inf, tops)
        sums = [
            torch.where(z == top[:, None], 1.0, (z - top[:, None]).exp()).double().sum(1)
            for z, top in zip((z_p, z_q), tops.T, strict=True)
        ]
        absent = (z_p == -math.inf) & (z_q == -math.inf)
        gap = z_p - z_q
        ends = torch.where(absent, -math.inf, gap).amax(1), torch.where(absent, math.inf, gap).amin(1)
        firsts = [z.argmax(1) + self.before for z in (z_p, z_q)]
        nan = (z_p.isnan() | z_q.isnan()).any(1)
        of_targets, best = None, None
        if self.targets is not None:
            token = self.targets[rows] - self.before
            own = (token >= 0) & (token < z_p.shape[1])
            place = token.clip(0, z_p.shape[1] - 1)[:, None]
            of_targets = torch.stack(
                [torch.where(own, z.gather(1, place)[:, 0], -math.inf).double() for z in (z_p, z_q)], 1
            )
        if self.top:
            keys = torch.stack([self._keys(z) for z in (z_p, z_q)], 1)
            if keys.shape[-1] < self.top:
                keys = torch.nn.functional.pad(keys, (0, self.top - keys.shape[-1]), value=NO_KEY)
            best = keys.topk(self.top, -1).values
        columns = [*tops.T, *sums, *ends, *firsts, nan]
        return FirstPass(torch.stack([column.double() for column in columns], 1), of_targets, best)

    def _second(self, z_p: Any, z_q: Any, rows: slice, found: FirstPass) -> Any:
        stats = found.stats[rows]
        (high_p, high_q), (mass_p, mass_q) = ([stats[:, k, None] for k in pair] for pair in ((0, 1), (2, 3)))
        ratio, log_mass_p, log_mass_q = ((x.log()).to(z_p.dtype) for x in (mass_p / mass_q, mass_p, mass_q))
        high_p, high_q = high_p.to(z_p.dtype), high_q.to(z_p.dtype)
        log_p, log_q = z_p - high_p, z_q - high_q
        # The logits' own difference keeps its digits unless one of them, or of the maxima, is far from the other.
        gap, apart = z_p - z_q, high_p - high_q
        near = (gap.abs() + apart.abs() <= log_p.abs() + log_q.abs()) & (gap.abs() < math.inf)
        d = torch.where(near, gap - apart, log_p - log_q) - ratio
        d = torch.where((log_p == -math.inf) & (log_q == -math.inf), 0.0, d)
        rises = d > 0
        log_h = torch.where(rises, log_p - log_mass_p, log_q - log_mass_q)
        h, x = log_h.exp(), d.abs()
        capped, e, v = x.clip(max=200.0), (-x).exp(), torch.expm1(-x)
        f, r = v + x, -v - capped * e
        js = -0.5 * ((1 + e) * torch.log1p(v / 2) + e * capped)
        term = h * (e * capped - v * log_h)
        # A token that one side cannot have makes a divergence infinite, however little the other has of it.
        alone = (z_p == -math.inf) != (z_q == -math.inf)
        own, other = torch.where(alone, x, torch.where(h > 0, h * f, 0.0)), torch.where(h > 0, h * r, 0.0)
        terms = [
            -h * v,
            torch.where(rises, own, other),
            torch.where(rises, other, own),
            h * js,
            torch.where(h > 0, torch.where(rises, -term, term), 0.0),
        ]
        sums = [summand.double().sum(1) for summand in terms]
        for side, z in enumerate((z_p, z_q)):
            tail = torch.zeros_like(sums[0])
            if found.best is not None:
                mass = torch.where(rises == (side == 0), h, h * e)
                least = found.best[rows, side].topk(self.top, -1).values[:, -1:]
                tail = torch.where(self._keys(z) < least, mass, 0.0).double().sum(1)
            sums.append(tail)
        return torch.stack(sums, 1)

    def _keys(self, z: Any) -> Any:
        """Return the sortable keys of `logit_kernel._key`."""
        bits = (z + 0.0).view(torch.int32).long()
        here = torch.arange(z.shape[1], device=z.device) + self.before
        return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) + (0x7FFFFFFF - here)


_failed: list[bool] = []


def logit_of(keys: Any) -> Any:
    """Logits, float32, that `best` has the keys of."""
    ordered = keys >> 32
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(torch.int32).view(torch.float32)


def by_kernel(*logits: Any) -> bool:
    """Return True if the Triton kernel accepts these logits."""
    if _failed or any(z.dtype not in (torch.bfloat16, torch.float16, torch.float32) for z in logits):
        return False
    return (logits[0].is_cuda or _kernel_is_interpreted()) and _kernel() is not None


@cache
def _kernel() -> Any:
    """Module `logit_kernel`; None where Triton is not installed or does not load."""
    try:
        from kc_otel.record.measure import logit_kernel  # noqa: PLC0415 - an extra
    except MissingExtraError:
        return None
    except Exception:  # noqa: BLE001 - as when it cannot be built
        _log.warning("logits are compared by torch: Triton does not load", exc_info=True)
        return None
    return logit_kernel


def _kernel_is_interpreted() -> bool:
    # With TRITON_INTERPRET=1 kernels run on the host, as tests do; nobody else does.
    return os.environ.get("TRITON_INTERPRET") == "1" and _kernel() is not None
