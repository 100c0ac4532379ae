"""Measurements of `logits` in one launch on a GPU: one program a row, which reads it twice.

The first pass keeps, in each lane, the largest logit and the sum of exp(z - that) of both sides (online log-sum-exp,
Milakov and Gimelshein 2018), the ends of their difference, the first index of the largest, and NaN.
Total variation and Jensen-Shannon are of |log p - log q|, which needs both normalisers, so they cannot be had from one
pass exactly; the second pass has them.

With h the larger of p and q, x = |d| = |log p - log q| and v = expm1(-x), a token's terms are
    |p - q| = -h v,    the KL weighted by h: h (v + x),    the other: h (-v - x exp(-x)),
    JS: -h ((2 + v) log1p(v/2) + x exp(-x))/2,    h log h - l log l, l = h exp(-x): h (-v log h + x exp(-x)),
of which all but the last are never negative: nothing cancels, and series take over where x < 1/2. So float32 is enough;
the normalisers and the entropies, which do cancel, are summed with Kahan's compensation, and lanes in float64.
With 1,024 lanes the others are off by at most 1.6e-5 of themselves at a vocabulary of 262,144.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from kc_otel._extras import extra

with extra("torch", "the kernel for a GPU"):
    import triton
    import triton.language as tl


_INFINITE: tl.constexpr = tl.constexpr(float("inf"))


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
def drift_kernel(
    train,
    inference,
    rows_train,
    rows_inference,
    step_train,
    step_inference,
    vocab,
    targets,
    values,
    logprobs,
    TARGETS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure the row of this program.

    `rows_train` and `rows_inference` say where each row begins, in elements, int64 [rows]; the steps are elements
    between neighbours. Fills `values`, float64 [rows, 7], `LOGITS` beyond their limits too and NaN where a row is no
    distribution, and if TARGETS `logprobs` of `targets`, float64 [rows, 2]. ALIGNED says that every row begins at a
    multiple of eight elements; BLOCK is the number of lanes.
    """
    row = tl.program_id(0).to(tl.int64)
    begin_p, begin_q = tl.load(rows_train + row), tl.load(rows_inference + row)
    if ALIGNED:
        begin_p, begin_q = tl.multiple_of(begin_p, 8), tl.multiple_of(begin_q, 8)
    train += begin_p
    inference += begin_q
    lane = tl.arange(0, BLOCK)
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
    high_p, mass_p, arg_p = _total(top_p, sum_p, carry_p, first_p)
    high_q, mass_q, arg_q = _total(top_q, sum_q, carry_q, first_q)
    wide, narrow, nan = tl.max(most, 0), tl.min(least, 0), tl.max(bad, 0)
    apart = high_p - high_q
    ratio = tl.log(mass_p / mass_q).to(tl.float32)
    log_mass_p, log_mass_q = tl.log(mass_p).to(tl.float32), tl.log(mass_q).to(tl.float32)
    distance = tl.zeros((BLOCK,), tl.float32)
    kl_pq = tl.zeros((BLOCK,), tl.float32)
    kl_qp = tl.zeros((BLOCK,), tl.float32)
    js = tl.zeros((BLOCK,), tl.float32)
    entropy = tl.zeros((BLOCK,), tl.float32)
    carry = tl.zeros((BLOCK,), tl.float32)
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
    valid = (nan == 0) & (high_p > -_INFINITE) & (high_q > -_INFINITE) & (high_p < _INFINITE) & (high_q < _INFINITE)
    which = tl.arange(0, 8)
    half_range = (wide.to(tl.float64) - narrow.to(tl.float64)) / 2
    found = tl.where(which == 0, half_range, tl.sum(distance.to(tl.float64), 0) / 2)
    found = tl.where(which == 2, tl.sum(kl_pq.to(tl.float64), 0), found)
    found = tl.where(which == 3, tl.sum(kl_qp.to(tl.float64), 0), found)
    found = tl.where(which == 4, tl.sum(js.to(tl.float64), 0), found)
    found = tl.where(which == 5, tl.where(arg_p == arg_q, 0.0, 1.0).to(tl.float64), found)
    found = tl.where(which == 6, tl.sum(entropy.to(tl.float64) - carry.to(tl.float64), 0), found)
    tl.store(values + row * 7 + which, tl.where(valid, found, float("nan")), mask=which < 7)
    if TARGETS:
        token = tl.load(targets + row)
        y_p = tl.load(train + token * step_train).to(tl.float64)
        y_q = tl.load(inference + token * step_inference).to(tl.float64)
        tl.store(logprobs + row * 2, y_p - high_p - tl.log(mass_p))
        tl.store(logprobs + row * 2 + 1, y_q - high_q - tl.log(mass_q))
