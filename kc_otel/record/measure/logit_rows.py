"""Measurements of `logits`, a row at a time in C, `logit_rows.c`: one read of the logits, then two cached arrays.

With q = exp(z' - max z') and g = (z - z') - (max z - max z'), a first loop leaves q and w = expm1(g), whose sums say
what P is short of Q: log(sum p / sum q) = log1p(sum q w / sum q) =: c. Then d = log p - log q = g - c and
expm1(d) = w exp(-c) + expm1(-c), so that three transcendental functions a logit are enough. They are polynomials that a
compiler turns into vectors: exp and log after Cephes (expf.c, logf.c), 2 ulp.

Sums are of float32 within 4,096 logits and of float64 beyond. A row that float32 cannot hold like this, with -inf on
one side only, d above 60 or maxima far apart, is left to the caller.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.machine_code import ADDRESS, NUMBER, function

MEASURED: Final = 0
INVALID: Final = 1
LEFT: Final = 2

_ARGUMENTS: Final = (ADDRESS, ADDRESS, NUMBER, ADDRESS, ADDRESS, NUMBER, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
_float32_rows: Final = function("kc_float32_rows", *_ARGUMENTS, long=True)
_bfloat16_rows: Final = function("kc_bfloat16_rows", *_ARGUMENTS, long=True)


def measure_rows(
    z_p: NDArray[np.float32 | np.uint16],
    z_q: NDArray[np.float32 | np.uint16],
    at: NDArray[np.intp],
    targets: NDArray[np.intp],
    values: NDArray[np.float64],
    logprobs: NDArray[np.float64],
    state: NDArray[np.int8],
) -> None:
    """Measure rows of logits; all arrays are C-contiguous, aligned, and of this machine's byte order.

    Args:
        z_p: Logits of the training kernel, float32 or the bits of bfloat16, uint16 [rows, vocab].
        z_q: Logits of the inference kernel, the same.
        at: Which rows [n].
        targets: A token of each, [n]; -1 for none.
        values: Filled: [n, 7], as `LOGITS` has them.
        logprobs: Filled where there is a target: [n, 2].
        state: Filled: [n], MEASURED, INVALID or LEFT.
    """
    half, vocab = z_p.dtype == np.uint16, z_p.shape[1]
    memory = np.empty((4 if half else 2) * vocab, np.float32)
    before = (z_p.ctypes.data, z_q.ctypes.data, vocab, at.ctypes.data, targets.ctypes.data, at.size)
    (_bfloat16_rows if half else _float32_rows)(*before, *(a.ctypes.data for a in (memory, values, logprobs, state)))
