"""Measurements of `logits` in one launch on a GPU: one program a row, which reads it twice.

The first pass keeps, in each lane, the largest logit and the sum of exp(z - that) of both sides (online log-sum-exp,
Milakov and Gimelshein 2018), the ends of their difference, the first index of the largest, NaN, and the k largest.
Total variation and Jensen-Shannon are of |log p - log q|, which needs both normalisers, so they cannot be had from one
pass exactly; the second pass has them. The passes can also be launched one at a time, around a merge of what different
shards of the vocabulary found.

With h the larger of p and q, x = |d| = |log p - log q| and v = expm1(-x), a token's terms are
    |p - q| = -h v,    the KL weighted by h: h (v + x),    the other: h (-v - x exp(-x)),
    JS: -h ((2 + v) log1p(v/2) + x exp(-x))/2,    h log h - l log l, l = h exp(-x): h (-v log h + x exp(-x)),
of which all but the last are never negative: nothing cancels, and series take over where x < 1/2. So float32 is enough;
the normalisers and the entropies, which do cancel, are summed with Kahan's compensation, and lanes in float64.
With 1,024 lanes the others are off by at most 1.6e-5 of themselves at a vocabulary of 262,144.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Final

from kc_otel._extras import extra

with extra("torch", "the kernel for a GPU"):
    import triton
    import triton.language as tl

__all__ = ["FIRST", "SECOND", "drift_kernel"]

FIRST: Final = 9
"""Columns of the first pass, float64: largest logits of both sides, sums of exp(z - that), ends of z - z', first
indices of the largest logits, and 1 where a logit is NaN."""
SECOND: Final = 7
"""Columns of the second pass: |p - q|, KL(P||Q), KL(Q||P), JS, H(P) - H(Q), and mass outside of the top k."""

_INFINITE: tl.constexpr = tl.constexpr(float("inf"))
_LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**63))
_HIGHEST_KEY: tl.constexpr = tl.constexpr(2**63 - 1)


@triton.jit
def _plus(total, carry, value):
    """Kahan's compensated sum."""
    y = value - carry
    grown = total + y
    return grown, (grown - total) - y


@triton.jit
def _seen(z, here, top, sum, carry, first):
    """A lane's largest logit, sum of exp(z - that) and first index, after one more logit."""
    higher = z > top
    fall = tl.where(z == top, 1.0, tl.exp(-tl.abs(z - top)))
    sum, carry = _plus(
        tl.where(higher, sum * fall, sum), tl.where(higher, carry * fall, carry), tl.where(higher, 1.0, fall)
    )
    return tl.where(higher, z, top), sum, carry, tl.where(higher, here, first)


@triton.jit
def _total(top, sum, carry, first):
    """A row's largest logit, sum of exp(z - that), float64, and first index, from its lanes'."""
    highest = tl.max(top, 0)
    weight = tl.where(top == highest, 1.0, tl.exp(top - highest)).to(tl.float64)
    total = tl.sum((sum.to(tl.float64) - carry.to(tl.float64)) * weight, 0)
    return highest, total, tl.min(tl.where(top == highest, first, 0x7FFFFFFF), 0)


@triton.jit
def _key(z, here):
    """An integer that orders logits as numbers, of equal ones the earlier first."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - here).to(tl.int64)


@triton.jit
def _kept(best, keys):
    """The largest keys of those that were kept and of those that come."""
    lane = tl.arange(0, best.shape[0])
    high, low = tl.max(keys, 0), tl.min(best, 0)
    while high > low:
        out = tl.min(tl.where(best == low, lane, 0x7FFFFFFF), 0)
        best = tl.where(lane == out, high, best)
        keys = tl.where(keys == high, _LOWEST_KEY, keys)
        high, low = tl.max(keys, 0), tl.min(best, 0)
    return best


@triton.jit
def _cell(edges, size, values):
    """Return the number of edges not above each value, by bisection; as `Partition.locate`."""
    low, high = tl.zeros_like(values).to(tl.int32), tl.zeros_like(values).to(tl.int32) + size
    for _ in range(20):
        open = low < high
        middle = (low + high) // 2
        above = open & (tl.load(edges + middle, mask=open, other=_INFINITE) <= values)
        low = tl.where(above, middle + 1, low)
        high = tl.where(open & ~above, middle, high)
    return low


@triton.jit
def drift_kernel(
    train,
    inference,
    rows_train,
    rows_inference,
    step_train,
    step_inference,
    vocab,
    before,
    targets,
    of_targets,
    first,
    second,
    best,
    k,
    edges,
    size,
    log_edges,
    log_size,
    group,
    counts,
    log_counts,
    SCAN: tl.constexpr,
    MEASURE: tl.constexpr,
    TARGETS: tl.constexpr,
    TOP: tl.constexpr,
    COUNT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure the row of this program.

    Args:
        train, inference: Logits, any floating type of at most four bytes.
        rows_train, rows_inference: Where each row begins, in elements, int64 [rows].
        step_train, step_inference: Elements between neighbours.
        vocab: Logits in a row.
        before: Tokens of the vocabulary in shards before this one.
        targets: Token of each row, int64 [rows], if TARGETS.
        of_targets: Logits of the targets, float64 [rows, 2]; targets in another shard are left unchanged.
        first, second: What each pass leaves, float64 [rows, FIRST] and [rows, SECOND].
        best: Keys of the TOP largest logits, int64 [rows, 2, TOP], if TOP; of the merged ones, the k
            largest come first.
        k: How many; at most TOP.
        edges, size: Edges of the buckets, ascending, float32 [size], if COUNT.
        log_edges, log_size: Those of the log ratio's cells.
        group: Counters of each row, int64 [rows].
        counts: Incremented: int64 [groups, 7, size + 1].
        log_counts: Incremented, if TARGETS: int64 [groups, log_size + 1].
        SCAN, MEASURE: Which passes are made.
        TARGETS, COUNT: Requested outputs.
        TOP: A power of two; 0 for none.
        ALIGNED: Whether every row begins at a multiple of eight elements.
        BLOCK: Lanes.
    """
    row = tl.program_id(0).to(tl.int64)
    begin_p, begin_q = tl.load(rows_train + row), tl.load(rows_inference + row)
    if ALIGNED:
        begin_p, begin_q = tl.multiple_of(begin_p, 8), tl.multiple_of(begin_q, 8)
    train += begin_p
    inference += begin_q
    first += row * 9
    lane = tl.arange(0, BLOCK)
    if TOP:
        slot = tl.arange(0, TOP)
        best += row * 2 * TOP
    if SCAN:
        top_p = tl.full((BLOCK,), -_INFINITE, tl.float32)
        top_q = tl.full((BLOCK,), -_INFINITE, tl.float32)
        sum_p = tl.zeros((BLOCK,), tl.float32)
        sum_q = tl.zeros((BLOCK,), tl.float32)
        carry_p = tl.zeros((BLOCK,), tl.float32)
        carry_q = tl.zeros((BLOCK,), tl.float32)
        first_p = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        first_q = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        most = tl.full((BLOCK,), -_INFINITE, tl.float32)
        least = tl.full((BLOCK,), _INFINITE, tl.float32)
        bad = tl.zeros((BLOCK,), tl.int32)
        if TOP:
            best_p = tl.where(slot < k, _LOWEST_KEY, _HIGHEST_KEY).to(tl.int64)
            best_q = tl.where(slot < k, _LOWEST_KEY, _HIGHEST_KEY).to(tl.int64)
        for start in range(0, vocab, BLOCK):
            here = start + lane
            inside = here < vocab
            z_p = tl.load(train + here.to(tl.int64) * step_train, mask=inside, other=-_INFINITE).to(tl.float32)
            z_q = tl.load(inference + here.to(tl.int64) * step_inference, mask=inside, other=-_INFINITE).to(tl.float32)
            bad = bad | (z_p != z_p).to(tl.int32) | (z_q != z_q).to(tl.int32)
            gap = tl.where((z_p == -_INFINITE) & (z_q == -_INFINITE), float("nan"), z_p - z_q)
            most = tl.where(gap > most, gap, most)
            least = tl.where(gap < least, gap, least)
            top_p, sum_p, carry_p, first_p = _seen(z_p, here, top_p, sum_p, carry_p, first_p)
            top_q, sum_q, carry_q, first_q = _seen(z_q, here, top_q, sum_q, carry_q, first_q)
            if TOP:
                best_p = _kept(best_p, tl.where(inside, _key(z_p, here + before), _LOWEST_KEY))
                best_q = _kept(best_q, tl.where(inside, _key(z_q, here + before), _LOWEST_KEY))
        high_p, mass_p, arg_p = _total(top_p, sum_p, carry_p, first_p)
        high_q, mass_q, arg_q = _total(top_q, sum_q, carry_q, first_q)
        wide, narrow, nan = tl.max(most, 0), tl.min(least, 0), tl.max(bad, 0)
        tl.store(first, high_p.to(tl.float64))
        tl.store(first + 1, high_q.to(tl.float64))
        tl.store(first + 2, mass_p)
        tl.store(first + 3, mass_q)
        tl.store(first + 4, wide.to(tl.float64))
        tl.store(first + 5, narrow.to(tl.float64))
        tl.store(first + 6, (arg_p + before).to(tl.float64))
        tl.store(first + 7, (arg_q + before).to(tl.float64))
        tl.store(first + 8, nan.to(tl.float64))
        if TOP:
            tl.store(best + slot, tl.where(slot < k, best_p, _LOWEST_KEY))
            tl.store(best + TOP + slot, tl.where(slot < k, best_q, _LOWEST_KEY))
        if TARGETS:
            token = tl.load(targets + row) - before
            mine = (token >= 0) & (token < vocab)
            y_p = tl.load(train + token * step_train, mask=mine, other=0.0).to(tl.float64)
            y_q = tl.load(inference + token * step_inference, mask=mine, other=0.0).to(tl.float64)
            tl.store(of_targets + row * 2, y_p, mask=mine)
            tl.store(of_targets + row * 2 + 1, y_q, mask=mine)
    else:
        high_p, high_q = tl.load(first).to(tl.float32), tl.load(first + 1).to(tl.float32)
        mass_p, mass_q = tl.load(first + 2), tl.load(first + 3)
        if TOP:
            best_p = tl.load(best + slot, mask=slot < k, other=_HIGHEST_KEY)
            best_q = tl.load(best + TOP + slot, mask=slot < k, other=_HIGHEST_KEY)
    if MEASURE:
        apart = high_p - high_q
        ratio = tl.log(mass_p / mass_q).to(tl.float32)
        log_mass_p, log_mass_q = tl.log(mass_p).to(tl.float32), tl.log(mass_q).to(tl.float32)
        if TOP:
            least_p, least_q = tl.min(best_p, 0), tl.min(best_q, 0)
        distance = tl.zeros((BLOCK,), tl.float32)
        kl_pq = tl.zeros((BLOCK,), tl.float32)
        kl_qp = tl.zeros((BLOCK,), tl.float32)
        js = tl.zeros((BLOCK,), tl.float32)
        entropy = tl.zeros((BLOCK,), tl.float32)
        carry = tl.zeros((BLOCK,), tl.float32)
        tail_p = tl.zeros((BLOCK,), tl.float32)
        tail_q = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            here = start + lane
            inside = here < vocab
            z_p = tl.load(train + here.to(tl.int64) * step_train, mask=inside, other=-_INFINITE).to(tl.float32)
            z_q = tl.load(inference + here.to(tl.int64) * step_inference, mask=inside, other=-_INFINITE).to(tl.float32)
            log_p, log_q = z_p - high_p, z_q - high_q
            # The logits' own difference keeps its digits unless one of them, or of the maxima, is far from the other.
            gap = z_p - z_q
            near = tl.abs(gap) + tl.abs(apart) <= tl.abs(log_p) + tl.abs(log_q)
            gap = tl.where(near & (tl.abs(gap) < _INFINITE), gap - apart, log_p - log_q) - ratio
            d = tl.where((log_p == -_INFINITE) & (log_q == -_INFINITE), 0.0, gap)
            rises = d > 0
            log_h = tl.where(rises, log_p - log_mass_p, log_q - log_mass_q)
            h = tl.exp(log_h)
            some = h > 0
            x = tl.abs(d)
            s = tl.minimum(x, 0.5)
            close = x < 0.5
            # exp(-x) - 1 + x, and the Jensen-Shannon term of h = 1.
            f = ((s * (1 / 40320) - 1 / 5040) * s + 1 / 720) * s - 1 / 120
            f = (((f * s + 1 / 24) * s - 1 / 6) * s + 0.5) * s * s
            j = ((s * (1 / 92160) - 1 / 11520) * s + 1 / 2304) * s - 1 / 384
            j = (((j * s + 1 / 64) * s - 1 / 16) * s + 0.125) * s * s
            e = tl.exp(-x)
            capped = tl.minimum(x, 200.0)
            v = tl.where(close, f - s, e - 1.0)
            f = tl.where(close, f, v + x)
            r = tl.where(close, s * s - f * (1.0 + s), -v - capped * e)
            e = tl.where(close, 1.0 + v, e)
            j = tl.where(close, j, -0.5 * ((1.0 + e) * tl.log(0.5 + 0.5 * e) + e * capped))
            distance += -h * v
            # A token that one side cannot have makes a divergence infinite, however little the other has of it.
            alone = (z_p == -_INFINITE) != (z_q == -_INFINITE)
            own, other = tl.where(alone, x, tl.where(some, h * f, 0.0)), tl.where(some, h * r, 0.0)
            kl_pq += tl.where(rises, own, other)
            kl_qp += tl.where(rises, other, own)
            js += h * j
            term = tl.where(some, h * (e * capped - v * log_h), 0.0)
            entropy, carry = _plus(entropy, carry, tl.where(rises, -term, term))
            if TOP:
                low = h * e
                p, q = tl.where(rises, h, low), tl.where(rises, low, h)
                tail_p += tl.where(_key(z_p, here + before) < least_p, p, 0.0)
                tail_q += tl.where(_key(z_q, here + before) < least_q, q, 0.0)
        second += row * 7
        all_distance = tl.sum(distance.to(tl.float64), 0)
        all_pq, all_qp = tl.sum(kl_pq.to(tl.float64), 0), tl.sum(kl_qp.to(tl.float64), 0)
        all_js = tl.sum(js.to(tl.float64), 0)
        change = tl.sum(entropy.to(tl.float64) - carry.to(tl.float64), 0)
        tl.store(second, all_distance)
        tl.store(second + 1, all_pq)
        tl.store(second + 2, all_qp)
        tl.store(second + 3, all_js)
        tl.store(second + 4, change)
        tl.store(second + 5, tl.sum(tail_p.to(tl.float64), 0))
        tl.store(second + 6, tl.sum(tail_q.to(tl.float64), 0))
    if COUNT:
        if (nan == 0) & (high_p > -_INFINITE) & (high_q > -_INFINITE) & (high_p < _INFINITE) & (high_q < _INFINITE):
            which = tl.arange(0, 8)
            half = (wide.to(tl.float64) - narrow.to(tl.float64)) / 2
            top_1 = tl.where(arg_p == arg_q, 0.0, 1.0).to(tl.float64)
            values = tl.where(which == 0, half, tl.where(which == 1, all_distance / 2, change))
            values = tl.where(which == 2, all_pq, tl.where(which == 3, all_qp, values))
            values = tl.where(which == 4, all_js, tl.where(which == 5, top_1, values))
            high = tl.where(which == 4, 0.6931471805599453, tl.where((which == 1) | (which == 5), 1.0, 64.0))
            low = tl.where(which == 6, -64.0, 0.0)
            values = tl.minimum(tl.maximum(values, low.to(tl.float64)), high.to(tl.float64))
            counter = tl.load(group + row)
            cell = _cell(edges, size, values.to(tl.float32))
            tl.atomic_add(counts + (counter * 7 + which) * (size + 1) + cell, 1, mask=which < 7)
            if TARGETS:
                log_w = (y_p - high_p - tl.log(mass_p)) - (y_q - high_q - tl.log(mass_q))
                log_w = tl.where(which == 0, log_w, float("nan")).to(tl.float32)
                known = log_w == log_w
                log_w = tl.minimum(tl.maximum(tl.where(known, log_w, 0.0), -64.0), 16.0)
                log_cell = _cell(log_edges, log_size, log_w)
                tl.atomic_add(log_counts + counter * (log_size + 1) + log_cell, 1, mask=known)
