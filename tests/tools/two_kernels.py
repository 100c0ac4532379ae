"""Recordings of tokens that one kernel samples and both score, from logits that differ by as much as a test says."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.recordings.recording import Recording


def sampled_from_logits(
    rng: np.random.Generator,
    lengths: NDArray[np.int64],
    noise: NDArray[np.float64],
    attributes: tuple[dict[str, Any], ...],
    *,
    logits: bool = True,
    **others: Any,
) -> Recording:
    """Return sequences of a vocabulary of 12; the kernels' logits differ by `noise` [sequences] standard deviations."""
    n = int(lengths.sum())
    z = rng.standard_normal((n, 12))
    other = z + np.repeat(noise, lengths)[:, None] * rng.standard_normal((n, 12))
    p, q = (scores - np.log(np.exp(scores).sum(1, keepdims=True)) for scores in (z, other))
    y = np.minimum((np.exp(q).cumsum(1) < rng.random((n, 1))).sum(1), 11)
    every = np.arange(n)
    both = {"train_logits": z, "inference_logits": other} if logits else {}
    return Recording(p[every, y], q[every, y], lengths, attributes, token_ids=y, **both, **others)
