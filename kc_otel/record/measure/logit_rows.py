"""What `logits` measures, a row at a time as machine code: one read of the logits, then two arrays that stay in cache.

With q = exp(z' - max z') and g = (z - z') - (max z - max z'), a first loop leaves q and w = expm1(g), whose sums say
what P is short of Q: log(sum p / sum q) = log1p(sum q w / sum q) =: c. Then d = log p - log q = g - c and
expm1(d) = w exp(-c) + expm1(-c), so that three transcendental functions a logit are enough. They are polynomials that a
compiler turns into vectors: exp and log after Cephes (expf.c, logf.c), 2 ulp.

Sums are of float32 within 4,096 logits and of float64 beyond. A row that float32 cannot hold like this, with -inf on
one side only, d above 60 or maxima far apart, is left to the caller.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy import float32 as f32
from numpy import int32 as i32

from kc_otel._extras import machine_code

__all__ = ["INVALID", "LEFT", "MEASURED", "bfloat16_rows", "float32_rows"]

MEASURED: Final = 0
INVALID: Final = 1
LEFT: Final = 2

_LANES: Final = 256
_CHUNK: Final = 4096
_STEEP: Final = 60.0
_FAR_APART: Final = 256.0
_LOG2_E: Final = f32(1.4426950408889634)
_LN2_HIGH: Final = f32(0.693145751953125)
_LN2_LOW: Final = f32(1.428606765330187e-06)
_LN2: Final = f32(0.6931471805599453)
_ROUND: Final = f32(12582912.0)  # 1.5 * 2^23: adding it leaves a rounded integer in the low bits
_SQRT_HALF: Final = i32(0x3F3504F3)
_ANY_ORDER: Final = {"contract", "reassoc", "nsz"}


def _extremes(z_p: Any, z_q: Any, lanes: Any) -> Any:
    """Both maxima and both ends of their difference, of what is not NaN; whether a logit is NaN."""
    lanes[:3], lanes[3] = -np.inf, np.inf
    top_p, top_q, most, least, bad = lanes[0], lanes[1], lanes[2], lanes[3], i32(0)
    for start in range(0, z_p.size, _LANES):
        p, q = z_p[start : start + _LANES], z_q[start : start + _LANES]
        for j in range(p.size):
            a, b = p[j], q[j]
            gap = a - b
            top_p[j] = a if a > top_p[j] else top_p[j]
            top_q[j] = b if b > top_q[j] else top_q[j]
            most[j] = gap if gap > most[j] else most[j]
            least[j] = gap if gap < least[j] else least[j]
            bad |= i32(a != a) | i32(b != b)  # noqa: PLR0124 - NaN is
    return top_p.max(), top_q.max(), most.max(), least.min(), bad


def _first(z: Any, value: Any) -> Any:
    """Index of the first logit that is `value`."""
    for start in range(0, z.size, _LANES):
        part, found = z[start : start + _LANES], i32(0)
        for j in range(part.size):
            found |= i32(part[j] == value)
        if found:
            for j in range(part.size):
                if part[j] == value:
                    return start + j
    return z.size


def _exponentials(z_p: Any, z_q: Any, top_p: Any, top_q: Any, q: Any, w: Any) -> None:
    """Fills q and w."""
    apart = top_p - top_q
    for i in range(z_p.size):
        x = max(z_q[i] - top_q, f32(-87))
        rounded = x * _LOG2_E + _ROUND
        n = rounded - _ROUND
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        y = f32(1.9875691500e-4) * r + f32(1.3981999507e-3)
        y = ((y * r + f32(8.3334519073e-3)) * r + f32(4.1665795894e-2)) * r + f32(1.6666665459e-1)
        y = (y * r + f32(5.0000001201e-1)) * r * r + r
        power = i32((f32(rounded).view(i32) + i32(127)) << i32(23)).view(f32)
        q[i] = y * power + power

        x = z_p[i] - z_q[i] - apart
        x = x if x == x else f32(0)  # noqa: PLR0124 - NaN, where both are -inf
        x = min(max(x, f32(-87)), f32(80))
        rounded = x * _LOG2_E + _ROUND
        n = rounded - _ROUND
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        y = f32(1.9875691500e-4) * r + f32(1.3981999507e-3)
        y = ((y * r + f32(8.3334519073e-3)) * r + f32(4.1665795894e-2)) * r + f32(1.6666665459e-1)
        y = (y * r + f32(5.0000001201e-1)) * r * r + r
        power = i32((f32(rounded).view(i32) + i32(127)) << i32(23)).view(f32)
        w[i] = y * power + (power - f32(1))


def _differences(z_p: Any, z_q: Any, apart: Any, shift: Any, w: Any, d: Any, log1p: Any) -> None:
    """Fills d and log1p(u/2), and turns w into u = expm1(d)."""
    scale, offset, less = f32(np.exp(-shift)), f32(np.expm1(-shift)), f32(shift)
    for i in range(w.size):
        g = z_p[i] - z_q[i] - apart
        g = g if g == g else f32(0)  # noqa: PLR0124 - NaN, where both are -inf
        d[i] = g - less
        u = w[i] * scale + offset
        y = u * f32(0.5)
        one = y + f32(1)
        bits = i32(f32(one).view(i32) - _SQRT_HALF)
        n = f32(i32(bits >> i32(23)))
        f = i32((bits & i32(0x7FFFFF)) + _SQRT_HALF).view(f32) - f32(1)
        v = f32(7.0376836292e-2) * f + f32(-1.1514610310e-1)
        v = ((v * f + f32(1.1676998740e-1)) * f + f32(-1.2420140846e-1)) * f + f32(1.4249322787e-1)
        v = ((v * f + f32(-1.6668057665e-1)) * f + f32(2.0000714765e-1)) * f + f32(-2.4999993993e-1)
        v = (v * f + f32(3.3333331174e-1)) * f - f32(0.5)
        w[i] = u
        log1p[i] = v * f * f + f + n * _LN2 + (y - (one - f32(1))) / one  # the last: what 1 + y rounded away


def _masses(q: Any, w: Any) -> Any:
    """Sums of q and of q w."""
    sum_q: Any = 0.0
    sum_w: Any = 0.0
    for start in range(0, q.size, _CHUNK):
        part, more, a, b = q[start : start + _CHUNK], w[start : start + _CHUNK], f32(0), f32(0)
        for i in range(part.size):
            a += part[i]
            b += part[i] * more[i]
        sum_q += a
        sum_w += b
    return sum_q, sum_w


def _sums(z_q: Any, top_q: Any, q: Any, u: Any, d: Any, log1p: Any, totals: Any) -> None:
    """Adds the sums of |p - q|, p d, q d, (p + q) log1p(u/2), p - q and (p - q) log q, each times sum q."""
    t0, t1, t2, t3, t4, t5 = f32(0), f32(0), f32(0), f32(0), f32(0), f32(0)
    for i in range(q.size):
        q_i = q[i]
        log_q = max(z_q[i] - top_q, f32(-1e6))
        change = q_i * u[i]
        p_i = q_i + change
        t0 += abs(change)
        t1 += p_i * d[i]
        t2 += q_i * d[i]
        t3 += (p_i + q_i) * log1p[i]
        t4 += change
        t5 += change * log_q
    totals[0] += t0
    totals[1] += t1
    totals[2] += t2
    totals[3] += t3
    totals[4] += t4
    totals[5] += t5


def _row(z_p: Any, z_q: Any, target: Any, scratch: Any, totals: Any, values: Any, logprobs: Any) -> Any:
    """One row's quantities and its target's log-probabilities; how it went."""
    top_p, top_q, most, least, bad = _extremes_code(z_p, z_q, scratch[2, : 4 * _LANES].reshape(4, _LANES))
    if bad or not (np.isfinite(top_p) and np.isfinite(top_q)):
        values[:] = np.nan
        return INVALID
    if not (np.isfinite(most) and np.isfinite(least) and most - least < _STEEP and abs(top_p - top_q) < _FAR_APART):
        return LEFT
    q, w, d, log1p = scratch[0, : z_p.size], scratch[1, : z_p.size], scratch[2, :_CHUNK], scratch[2, _CHUNK:]
    _exponentials_code(z_p, z_q, top_p, top_q, q, w)
    sum_q, sum_w = _masses_code(q, w)
    shift = np.log1p(sum_w / sum_q)
    totals[:] = 0
    for start in range(0, z_p.size, _CHUNK):
        a, b = z_p[start : start + _CHUNK], z_q[start : start + _CHUNK]
        part, u = q[start : start + _CHUNK], w[start : start + _CHUNK]
        _differences_code(a, b, top_p - top_q, shift, u, d, log1p)
        _sums_code(b, top_q, part, u, d, log1p, totals)
    distance, p_d, q_d, mixture, rest, entropy = totals / sum_q
    values[0] = f32(most - least) / 2.0
    values[1] = distance / 2
    values[2] = p_d - rest
    values[3] = rest - q_d
    values[4] = (p_d - mixture) / 2
    values[5] = 1.0 if _first_code(z_p, top_p) != _first_code(z_q, top_q) else 0.0
    values[6] = -p_d - entropy
    if target >= 0:
        log_sum = np.log(sum_q)
        logprobs[0] = np.float64(z_p[target]) - np.float64(top_p) - log_sum - shift
        logprobs[1] = np.float64(z_q[target]) - np.float64(top_q) - log_sum
    return MEASURED


def _float32_rows(z_p: Any, z_q: Any, at: Any, targets: Any, values: Any, logprobs: Any, state: Any) -> None:
    """Measure rows of float32 logits.

    Args:
        z_p: Logits of the training kernel, float32 [rows, vocab], C-contiguous.
        z_q: Logits of the inference kernel, the same.
        at: Which rows, integers [n].
        targets: A token of each, [n]; -1 for none.
        values: Filled: float64 [n, 7], as `LOGITS` has them.
        logprobs: Filled where there is a target: float64 [n, 2].
        state: Filled: int8 [n], MEASURED, INVALID or LEFT.
    """
    scratch, totals = np.empty((3, max(z_p.shape[1], 2 * _CHUNK)), f32), np.empty(6)
    for k in range(at.size):
        i = at[k]
        state[k] = _row_code(z_p[i], z_q[i], targets[k], scratch, totals, values[k], logprobs[k])


def _bfloat16_rows(z_p: Any, z_q: Any, at: Any, targets: Any, values: Any, logprobs: Any, state: Any) -> None:
    """The same of bfloat16 logits, given as their bits, uint16."""
    scratch, totals = np.empty((3, max(z_p.shape[1], 2 * _CHUNK)), f32), np.empty(6)
    wide = np.empty((2, z_p.shape[1]), np.uint32)
    for k in range(at.size):
        i = at[k]
        for j in range(z_p.shape[1]):
            wide[0, j] = np.uint32(z_p[i, j]) << np.uint32(16)
            wide[1, j] = np.uint32(z_q[i, j]) << np.uint32(16)
        row_p, row_q = wide[0].view(f32), wide[1].view(f32)
        state[k] = _row_code(row_p, row_q, targets[k], scratch, totals, values[k], logprobs[k])


_extremes_code = machine_code(_extremes, error_model="numpy", nogil=True)
_first_code = machine_code(_first, nogil=True)
_exponentials_code = machine_code(_exponentials, error_model="numpy", fastmath={"contract"}, nogil=True)
_differences_code = machine_code(_differences, error_model="numpy", fastmath={"contract"}, nogil=True)
_masses_code = machine_code(_masses, error_model="numpy", fastmath=_ANY_ORDER, nogil=True)
_sums_code = machine_code(_sums, error_model="numpy", fastmath=_ANY_ORDER, nogil=True)
_row_code = machine_code(_row, error_model="numpy", nogil=True)
float32_rows = machine_code(_float32_rows, nogil=True)
bfloat16_rows = machine_code(_bfloat16_rows, nogil=True)
