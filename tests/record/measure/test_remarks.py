"""Remarks on numbers that are judged: drift that looks like a sampler's setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.remarks import remarks
from kc_otel.recordings.recording_files import load_recording
from tests.tools.planted_faults import HONEST, honest, sampled, texts

RECORDINGS = sorted((Path(__file__).parents[3] / "examples" / "real_model" / "recordings").glob("*.npz"))
TEMPERATURE = "compare the two sides' temperatures and weights"


def said(train, inference):
    """Remarks on log P and log Q, [rows, tokens]."""
    rows, tokens = train.shape
    lengths = np.full(rows, tokens)
    return remarks(Block(np.arange(rows), np.arange(rows) * tokens, lengths, train.ravel(), inference.ravel()))


@pytest.mark.parametrize(("temperature", "side"), [(0.7, "inference"), (0.8, "inference"), (1.25, "training")])
@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_drift_that_looks_like_a_temperature_is_remarked(temperature, side, noise):
    """Under kernels that differ as in fp8, where no line fits it."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        logits = texts(rng, (100, 128), 0.5)
        other = (logits + noise * rng.standard_normal(logits.shape)) / temperature
        found = said(*sampled(rng, logits, other))
        assert TEMPERATURE in found, seed
        assert f"the {side} side is surer of" in found, seed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HONEST, "garbage"])
def test_drift_of_kernels_does_not_look_like_a_temperature(kind):
    """Nor does a kernel that computes something else at some positions, or at all."""
    for seed in range(10):
        for share in (0.15, 0.5, 1.0) if kind == "garbage" else (0.0,):
            assert TEMPERATURE not in said(*honest(kind, np.random.default_rng(seed), (100, 128), 0.5, share)), seed


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_real_kernels_do_not_look_like_a_temperature(path):
    recording = load_recording(path)
    assert TEMPERATURE not in said(recording.train.reshape(1, -1), recording.inference.reshape(1, -1))
