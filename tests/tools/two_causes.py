"""Simulated rollouts of asynchronous training, with planted drift of the kernels, planted staleness, or both."""

import numpy as np
from numpy.typing import NDArray

LIMIT = 0.03
"""Of the mean of (1 - P/Q)+ over tokens: what is planted lies above it, and what is not, below."""
PLANTED = {
    "the kernels' drift grew": (0.25, 0.01),
    "staleness grew, not the kernels' drift": (0.02, 0.4),
    "both grew": (0.25, 0.4),
}
"""What has to be said, and the drift and aging of which."""
SHARES = {"0": 0.75, "1": 0.0625, "2-3": 0.0625, "4-7": 0.0625, "8+": 0.0625}
"""Share of the tokens by lag."""


def sampled(
    seed: int, drift: float, aging: float, per_lag: int = 40
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Both kernels' log-probabilities and the lag of the weights that sampled, of each token, [sequences, 12].

    Half of the sequences are the training kernel's own weights'; of the others the first half of the tokens is older.
    """
    rng = np.random.default_rng(seed)
    lags = np.repeat(np.repeat([0, 0, 0, 0, 1, 2, 5, 12], per_lag)[:, None], 12, 1)
    lags[:, 6:] = 0
    now = rng.normal(size=(*lags.shape, 16))
    then = now + aging * np.sqrt(lags)[..., None] * rng.normal(size=now.shape)
    engine = then + drift * rng.normal(size=now.shape)
    train, inference = (side - np.log(np.exp(side).sum(-1, keepdims=True)) for side in (now, engine))
    word = (inference + rng.gumbel(size=now.shape)).argmax(-1)[..., None]
    train, inference = (np.take_along_axis(side, word, -1)[..., 0] for side in (train, inference))
    return train, inference, lags
