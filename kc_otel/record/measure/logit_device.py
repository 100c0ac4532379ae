"""Logits compared where the tensors are: by the kernel of `logit_kernel` where Triton is, by torch where it is not.

Everything here enqueues work and returns tensors; nothing waits for the device. A kernel that fails is said once, and
not tried again in this process.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any, Final

from kc_otel._extras import MissingExtraError, extra
from kc_otel.record.measure.logits import LOGITS, guarded

with extra("torch", "comparing logits on a device"):
    import torch


_LANES: Final = 1024
_BLOCK: Final = 1 << 20
"""Logits that torch works on at a time: a dozen arrays of float64 of that size exist."""
_log = logging.getLogger(__name__)
_failed: list[bool] = []


def device_drift(train: Any, inference: Any, at: tuple[Any, ...], targets: Any = None) -> tuple[Any, Any]:
    """Compare logits, in one launch where Triton is.

    Both are [..., vocab] on one device, of any floating types and strides; `at` has the rows, one int64 tensor for each
    leading axis, and `targets` a token of each. Returns the quantities of `LOGITS`, float64 [rows, 7], beyond their
    limits too and NaN in rows that are not valid; and both sides' log-probabilities of the targets, float64 [rows, 2].
    """
    if train.is_complex() or inference.is_complex():
        raise ValueError("logits: complex numbers; pass real ones")
    sides = train.detach(), inference.detach()
    if at[0].numel() and by_kernel(*sides):
        try:
            return _launched(*sides, at, targets)
        except Exception:  # noqa: BLE001 - a kernel that cannot be built here must not fail its caller
            _failed.append(True)
            _log.warning("logits are compared by torch: the Triton kernel failed", exc_info=True)
    step = max(1, _BLOCK // train.shape[-1])
    values, logprobs = [], []
    for first in range(0, max(at[0].numel(), 1), step):
        some = slice(first, first + step)
        z_p, z_q = (side[tuple(axis[some] for axis in at)].double() for side in sides)
        values.append(guarded(z_p, z_q, torch))
        if targets is not None:
            place = targets[some, None]
            logprobs.append(torch.cat([z.log_softmax(-1).gather(1, place) for z in (z_p, z_q)], 1))
    return torch.cat(values), torch.cat(logprobs) if logprobs else None


def _launched(train: Any, inference: Any, at: tuple[Any, ...], targets: Any) -> tuple[Any, Any]:
    rows, vocab, sides = at[0].numel(), train.shape[-1], (train, inference)
    values = torch.empty((rows, len(LOGITS)), dtype=torch.float64, device=train.device)
    logprobs = None if targets is None else values.new_empty((rows, 2))
    begins = [sum(axis * step for axis, step in zip(at, z.stride()[:-1], strict=True)) for z in sides]
    with torch.cuda.device_of(train):  # Triton launches on the current device
        _kernel().drift_kernel[(rows,)](
            *sides,
            *begins,
            *(z.stride(-1) for z in sides),
            vocab,
            begins[0] if targets is None else targets,
            values,
            values if logprobs is None else logprobs,
            TARGETS=targets is not None,
            ALIGNED=all(step % 8 == 0 for z in sides for step in z.stride()[:-1]),
            BLOCK=min(_LANES, 1 << max(vocab - 1, 15).bit_length()),
            num_warps=8,
        )
    return values, logprobs


def by_kernel(*logits: Any) -> bool:
    """Return True if the Triton kernel accepts these logits; with TRITON_INTERPRET=1, as in tests, on the host too."""
    if _failed or any(z.dtype not in (torch.bfloat16, torch.float16, torch.float32) for z in logits):
        return False
    return (logits[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _kernel() is not None


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
