"""Samples, histograms and small pairs of kernels whose divergences can be computed exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kc_otel.stats import Buckets, ExponentialHistogram

ZERO = 2.0**-30


def _index(magnitude: np.ndarray, scale: int) -> np.ndarray:
    index = np.ceil(np.log2(magnitude) * 2.0**scale).astype(np.int64) - 1
    with np.errstate(over="ignore"):
        index += magnitude > np.exp2((index + 1) * 2.0**-scale)
        index -= magnitude <= np.exp2(index * 2.0**-scale)
    return index


def _buckets(magnitude: np.ndarray, scale: int) -> Buckets:
    if not magnitude.size:
        return Buckets.empty()
    index = _index(magnitude, scale)
    return Buckets(int(index.min()), np.bincount(index - index.min()).astype(np.int64))


def _histogram(values, scale: int = 4, zero: float = ZERO) -> ExponentialHistogram:
    x = np.asarray(values, dtype=np.float64).ravel()
    if not x.size:
        return ExponentialHistogram.empty(scale)
    return ExponentialHistogram(
        scale=scale,
        count=x.size,
        sum=float(x.sum()),
        zero_count=int((np.abs(x) <= zero).sum()),
        positive=_buckets(x[x > zero], scale),
        negative=_buckets(-x[x < -zero], scale),
        minimum=float(x.min()),
        maximum=float(x.max()),
        zero_threshold=zero,
    )


@pytest.fixture(scope="session")
def histogram_of() -> Callable[..., ExponentialHistogram]:
    """Builds the exponential histogram of a sample, value by value's own definition."""
    return _histogram


@pytest.fixture(scope="session")
def divergences() -> Callable[..., dict[str, float]]:
    """TV, both KLs and chi2 of two distributions [V], by their definitions."""

    def compute(p: np.ndarray, q: np.ndarray) -> dict[str, float]:
        with np.errstate(divide="ignore", invalid="ignore"):
            kl_pq = np.where(p > 0, p * (np.log(p) - np.log(q)), 0.0).sum()
            kl_qp = np.where(q > 0, q * (np.log(q) - np.log(p)), 0.0).sum()
            chi2 = np.where(q > 0, (p - q) ** 2 / q, np.where(p > 0, np.inf, 0.0)).sum()
        return {"tv": float(np.abs(p - q).sum() / 2), "kl_pq": float(kl_pq), "kl_qp": float(kl_qp), "chi2": float(chi2)}

    return compute


@pytest.fixture(scope="session")
def random_kernels() -> Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]:
    """Conditional tables of two autoregressive kernels: for each step an array [V^t, V], rows adding up to one."""

    def make(seed: int, vocabulary: int, horizon: int, drift: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        rng = np.random.default_rng(seed)
        train, inference = [], []
        for step in range(horizon):
            logits = rng.normal(0.0, 1.5, (vocabulary**step, vocabulary))
            moved = logits + drift * rng.uniform(-1.0, 1.0, logits.shape)
            for tables, z in ((train, moved), (inference, logits)):
                weight = np.exp(z - z.max(axis=1, keepdims=True))
                tables.append(weight / weight.sum(axis=1, keepdims=True))
        return train, inference

    return make


@pytest.fixture(scope="session")
def joint() -> Callable[[list[np.ndarray]], np.ndarray]:
    """Probability of every sequence [V^T] from conditional tables."""

    def multiply(tables: list[np.ndarray]) -> np.ndarray:
        probability = np.ones(1)
        for table in tables:
            probability = (probability[:, None] * table).ravel()
        return probability

    return multiply


@pytest.fixture(scope="session")
def log_token_ratios() -> Callable[..., np.ndarray]:
    """Log ratio l_t of every sequence and step [V^T, T] from two kernels' conditional tables."""

    def compute(train: list[np.ndarray], inference: list[np.ndarray]) -> np.ndarray:
        horizon, vocabulary = len(train), train[0].shape[1]
        columns = []
        for step in range(horizon):
            ratio = np.log(train[step] / inference[step]).ravel()
            columns.append(np.repeat(ratio, vocabulary ** (horizon - step - 1)))
        return np.stack(columns, axis=1)

    return compute


@pytest.fixture(scope="session")
def three_sigma() -> Callable[[float, int], float]:
    """Largest miss rate that Monte Carlo error explains: alpha plus three standard deviations over the runs."""
    return lambda alpha, runs: alpha + 3.0 * math.sqrt(alpha * (1.0 - alpha) / runs)
