"""The Triton kernel that compares logits, run on a CPU by Triton's interpreter, against float64."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kc_otel.record.measure import logits as measured_logits
from kc_otel.record.measure.logits import logit_drift
from tests.record.measure import test_logits

ROOT = Path(__file__).parents[3]
pytestmark = [
    # Of the interpreter, which computes with NumPy what a GPU computes silently.
    *[pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning") for what in ("invalid", "overflow")],
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here"),
]


@pytest.fixture(autouse=True)
def _few_lanes(monkeypatch):
    """Several blocks a row, also of a small vocabulary, and no failure that another test left."""
    failures = []
    monkeypatch.setattr(measured_logits, "_LANES", 32)
    monkeypatch.setattr(measured_logits, "_failed", failures)
    yield
    assert not failures


def pair(drift, rows=5, vocab=90, seed=0):
    return tuple(map(torch.from_numpy, test_logits.pair(drift, rows, vocab, seed)))


def exact(train, inference):
    """The path without torch, in float64."""
    return logit_drift(train.double().numpy(), inference.double().numpy()).values


def by_kernel(train, inference, targets=None):
    return logit_drift(train, inference, targets=targets, _tensors=True)


@st.composite
def adversarial(draw):
    """A pair of float32 rows: ties, masked tokens, all mass on one, huge magnitudes, or what is no distribution."""
    vocab = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    sides = []
    base = rng.integers(-40, 40, vocab) / 4
    for _ in range(2):
        z = base + rng.integers(-3, 4, vocab) / 4 * draw(st.sampled_from([0, 0.25, 1, 8]))
        kind = draw(st.sampled_from(["plain", "masked", "one", "huge", "far", "nan", "inf", "nothing"]))
        if kind == "masked":
            z[rng.random(vocab) < 0.4] = -np.inf
        elif kind == "one":
            z[:] = -np.inf
            z[draw(st.integers(0, vocab - 1))] = 3
        elif kind == "huge":
            z[draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([1e30, -3e38, 3e38]))
        elif kind == "far":
            z = z * 512
        elif kind in {"nan", "inf"}:
            z[draw(st.integers(0, vocab - 1))] = float(kind)
        elif kind == "nothing":
            z[:] = -np.inf
        sides.append(z.astype(np.float32))
    return sides


@pytest.mark.slow
@example([np.float32([7, 1e30]), np.float32([7, 2.5])])
@example([np.float32([1e30, 2.5]), np.float32([7, 2.5])])
@example([np.float32([0, -np.inf, 2]), np.float32([3584, -4736, -np.inf])])
@given(adversarial())
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_whatever_the_logits_are_the_kernel_says_what_float64_says(sides):
    """Every quantity of rows that a careless formula gets wrong; rows that are no distributions are NaN."""
    train, inference = (torch.from_numpy(side)[None] for side in sides)
    np.testing.assert_allclose(by_kernel(train, inference).values, exact(train, inference), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_a_vocabulary_of_262144(monkeypatch):
    """One row of it, whose last token is the target and the most likely; with more lanes than on a GPU, to be quick."""
    monkeypatch.setattr(measured_logits, "_LANES", 8192)
    train, inference = pair(0.05, rows=1, vocab=1 << 18)
    train[0, -1] = 40.0
    drift = by_kernel(train, inference, [(1 << 18) - 1])
    np.testing.assert_allclose(drift.values, exact(train, inference), rtol=2e-5, atol=1e-6)
    assert drift.train_logprob[0] == pytest.approx(train.double().log_softmax(-1)[0, -1].item(), abs=1e-6)


@pytest.mark.slow
def test_any_strides_and_types_are_read_in_place():
    """A transposed view, every other row, a slice of the vocabulary, and two types of half precision."""
    train, inference = pair(0.3, rows=6, vocab=64)
    views = [
        (train.T.contiguous().T, inference),
        (train[::2], inference[::2]),
        (train[:, 1:40:3], inference[:, 1:40:3]),
        (train.bfloat16(), inference.half()),
        (
            train.reshape(2, 3, 64)[:, 1:],
            inference.reshape(2, 3, 64).transpose(0, 1).contiguous().transpose(0, 1)[:, 1:],
        ),
    ]
    for left, right in views:
        flat = (side.float().reshape(-1, side.shape[-1]) for side in (left, right))
        np.testing.assert_allclose(by_kernel(left, right).values, exact(*flat), rtol=1e-5, atol=1e-6)


def test_a_kernel_that_fails_is_said_once_and_torch_does_the_work(monkeypatch, caplog):
    """Whoever is watched notices nothing, and the log says why it is slower, once."""
    train, inference = pair(0.1)
    kernel = measured_logits._kernel()
    monkeypatch.setattr(measured_logits, "_failed", [])
    monkeypatch.setattr(kernel, "drift_kernel", None)
    for _ in range(2):
        values = logit_drift(train, inference, _tensors=True).values
        np.testing.assert_allclose(values, exact(train, inference), rtol=1e-4, atol=1e-6)
    assert [record.getMessage() for record in caplog.records] == [
        "logits are compared by torch: the Triton kernel failed"
    ]


def test_complex_numbers_are_refused():
    train = pair(0.1)[0].cfloat()
    with pytest.raises(ValueError, match="complex numbers"):
        by_kernel(train, train)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kc_otel.record.measure.logit_kernel import drift_kernel
names = drift_kernel.arg_names
types = dict.fromkeys(names, "i32") | dict.fromkeys(["rows_train", "rows_inference", "targets"], "*i64")
types |= {"train": "*bf16", "inference": "*fp16", "values": "*fp64", "logprobs": "*fp64"}
for targets in (True, False):
    known = dict(TARGETS=targets, ALIGNED=targets, BLOCK=1024)
    signature = types | dict.fromkeys(known, "constexpr")
    source = ASTSource(drift_kernel, signature, {(names.index(name),): value for name, value in known.items()})
    assert triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8}).asm["cubin"]
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    """Triton's compiler and ptxas, which need no GPU, make machine code for an H100 or H200 of every variant."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
