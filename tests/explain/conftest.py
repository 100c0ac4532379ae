from collections.abc import Callable

import numpy as np
import pytest

from kc_otel.contract import Contract, load_text

_HEAD = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: c, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
"""


@pytest.fixture(scope="session")
def contract() -> Callable[..., Contract]:
    """A contract from the lines after its head."""
    return lambda *lines: load_text(_HEAD + "\n".join(lines) + "\n", "c.yaml")


@pytest.fixture(scope="session")
def random_policies() -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """P and Q of every sequence [V^T] and log ratio of every token of it [V^T, T], of random autoregressive kernels."""

    def make(seed: int, vocabulary: int, horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        drift = rng.choice([0.05, 0.3, 1.5])
        p, q = np.ones(1), np.ones(1)
        ratios = np.zeros((1, 0))
        for _ in range(horizon):
            z = rng.normal(0, 1.5, (p.size, vocabulary))
            moved = z + drift * rng.normal(size=z.shape)
            a, b = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (moved, z))
            step = np.log(a / b).reshape(-1, 1)
            p, q = (p[:, None] * a).ravel(), (q[:, None] * b).ravel()
            ratios = np.hstack([np.repeat(ratios, vocabulary, axis=0), step])
        return p, q, ratios

    return make
