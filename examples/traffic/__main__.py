"""Made-up log-probabilities of two kernels without end: a sound pair, and a slice that drifts every five minutes.

    python -m examples.traffic examples/traffic/contract.yaml

It needs no engine and no GPU: log ratios are Gaussian, so that total variation is about 0.4 of their deviation and the
KL divergence half its square. `docker compose up` runs it, so that there is something to see. Where it sends to is
said by OTEL_EXPORTER_OTLP_ENDPOINT; each slice of the contract gets sequences that belong to it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kc_otel import Recorder

SOUND, DRIFTING = 0.03, 0.3
"""Deviations of the log ratio, nats."""
PERIOD, SOON, DRIFT = 300.0, 45.0, 75.0
"""Seconds from one drift to the next, from the start to the first, and that each lasts."""
SEQUENCES, TOKENS = 16, 128

# Attributes that put a sequence into a slice of contract.yaml, and of the example contracts for serving.
TRAFFIC = (
    {"task": "chat", "language": "en", "prompt_tokens": 400},
    {"task": "code", "language": "en", "prompt_tokens": 2000},
    {"task": "chat", "language": "de", "prompt_tokens": 400},
    {"task": "chat", "language": "en", "prompt_tokens": 12_000},
)


def deviation(attributes: dict[str, object], seconds: float) -> float:
    """Of the log ratios of a kind of traffic, this long after the start: code drifts soon after each period begins."""
    drifts = attributes["task"] == "code" and SOON <= seconds % PERIOD < SOON + DRIFT
    return DRIFTING if drifts else SOUND


def batch(rng: np.random.Generator, sigma: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-probabilities of sampled tokens under the training and the inference kernel, [sequences, tokens]."""
    inference = np.log(rng.uniform(0.05, 0.6, (SEQUENCES, TOKENS)))
    train = inference + rng.normal(-sigma * sigma / 2, sigma, inference.shape)
    return -np.abs(train), inference  # reflected, for no kernel gives exactly 0 to many tokens


def send(recorder: Recorder, rng: np.random.Generator, seconds: float) -> None:
    """One batch of each kind of traffic."""
    for attributes in TRAFFIC:
        train, inference = batch(rng, deviation(attributes, seconds))
        recorder.compare(train, inference, attributes=attributes)


def main() -> None:
    """Send until stopped, and say so in a file that a health check can look at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contract", type=Path, help="contract that the traffic is measured for")
    parser.add_argument("--alive", type=Path, help="file whose time is that of the latest batch")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between batches")
    given = parser.parse_args()
    rng, start = np.random.default_rng(), time.monotonic()
    with Recorder(given.contract, sampling=1.0) as recorder:
        while True:
            send(recorder, rng, time.monotonic() - start)
            if given.alive is not None:
                given.alive.touch()
            time.sleep(given.every)


if __name__ == "__main__":
    main()
