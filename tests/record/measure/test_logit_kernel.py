"""The Triton kernel that compares logits, run on a CPU by Triton's interpreter, against float64."""

import math
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

from kc_otel.record.measure import logit_device, logit_passes
from kc_otel.record.measure.logit_device import LogitCounts, device_drift, hidden_drift, merged
from kc_otel.record.measure.logits import SATURATION, logit_drift
from kc_otel.record.telemetry.groups import cells, in_groups

ROOT = Path(__file__).parents[3]
pytestmark = [
    # Of the interpreter, which computes with NumPy what a GPU computes silently.
    *[pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning") for what in ("invalid", "overflow")],
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here"),
]
PASSES = pytest.mark.parametrize(
    "failed", [pytest.param([], id="kernel", marks=pytest.mark.slow), pytest.param([True], id="torch")]
)


@pytest.fixture(autouse=True)
def _few_lanes(monkeypatch):
    """Several blocks a row, also of a small vocabulary, and no failure that another test left."""
    failures = []
    monkeypatch.setattr(logit_passes, "_LANES", 32)
    monkeypatch.setattr(logit_passes, "_failed", failures)
    yield
    assert not failures


def pair(drift, rows=5, vocab=90, seed=0):
    """Logits of two kernels, float32."""
    rng = np.random.default_rng(seed)
    inference = 3 * rng.standard_normal((rows, vocab))
    train = inference + drift * rng.standard_normal((rows, vocab)) + 3 * rng.standard_normal((rows, 1))
    return torch.from_numpy(train.astype(np.float32)), torch.from_numpy(inference.astype(np.float32))


def exact(train, inference):
    """The path without torch, in float64, which takes for nothing what is less than exp(-745)."""
    found = logit_drift(train.double().numpy(), inference.double().numpy())
    beyond = ((inference == -math.inf) & (train > -math.inf)), ((train == -math.inf) & (inference > -math.inf))
    for column, tokens in zip((2, 3), beyond, strict=True):
        found.values[found.valid & tokens.any(1).numpy(), column] = SATURATION
    return found.values


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
    np.testing.assert_allclose(device_drift(train, inference).values, exact(train, inference), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@example(1e-5, 4, 1)
@given(st.sampled_from([1e-5, 0.01, 0.5, 4.0]), st.integers(1, 200), st.integers(0, 999))
@settings(max_examples=12, deadline=None)
def test_float32_is_enough(drift, vocab, seed):
    """Quantities that are sums of squares of small differences keep five digits of themselves."""
    train, inference = pair(drift, 2, vocab, seed)
    found, expected = device_drift(train, inference).values.numpy(), exact(train, inference)
    digits = 2e-5 + 2e-7 / drift
    # Rounded to float32, probabilities put half of the sum of their distances off by half a unit in the last place.
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=digits, atol=2.0**-24)
    np.testing.assert_allclose(found[:, 2:5], expected[:, 2:5], rtol=digits, atol=1e-7 * drift)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@PASSES
def test_the_most_likely_tokens_and_what_is_outside_of_them(failed, monkeypatch):
    """Of equal logits the earlier token comes first; the tail is summed; a vocabulary may be smaller than k."""
    monkeypatch.setattr(logit_passes, "_failed", failed)
    train, inference = pair(0.3, rows=3)
    train[0, 7], train[0, 40], train[1, :] = 30.0, 30.0, -0.0
    train[1, 5], inference[2, :] = 0.0, -math.inf
    inference[2, 3] = 1.0
    top = device_drift(train, inference, top=3).top
    assert top.tokens[0, 0, :2].tolist() == [7, 40]
    assert top.tokens[1, 0].tolist() == [0, 1, 2]
    for side, z in enumerate((train, inference)):
        logprobs = torch.log_softmax(z.double(), -1)
        torch.testing.assert_close(top.logprobs[:, side], logprobs.gather(1, top.tokens[:, side]), rtol=0, atol=1e-6)
        mass = logprobs.exp().scatter(1, top.tokens[:, side], 0.0).sum(1)
        torch.testing.assert_close(top.tail[:, side], mass, rtol=1e-5, atol=0)
    few = device_drift(train[:1, :2], inference[:1, :2], top=4).top
    assert few.tokens[0, 0, 2:].tolist() == [-1, -1]
    assert few.logprobs[0, 0, 2:].tolist() == [-math.inf, -math.inf]
    assert few.tail.tolist() == [[0.0, 0.0]]


@PASSES
def test_rows_are_counted_in_their_slices_buckets(failed, monkeypatch):
    """Each quantity of each valid row is in the bucket that the host would find, once in every slice of the row."""
    monkeypatch.setattr(logit_passes, "_failed", failed)
    train, inference = pair(0.4, rows=12)
    train[3, 2] = math.nan
    targets = torch.arange(12)
    inference[4, 4] = -math.inf
    groups = in_groups(np.array([[1, i % 2, i > 6] for i in range(12)], dtype=bool))
    partition, log_partition = cells(4).slots.partition, cells(4).partition
    counters = LogitCounts.empty(groups.of, groups.members.shape[0], partition.edges, log_partition.edges, train.device)
    drift = device_drift(train, inference, targets=targets, counters=counters)
    with pytest.raises(ValueError, match="counters: groups of 12 rows for 0"):
        device_drift(train[:0], inference[:0], counters=counters)
    counts = counters.by_slice(groups.members)
    assert counts.shape == (3, 7, partition.size)
    for slice in range(3):
        inside = groups.members[groups.of, slice] & (np.arange(12) != 3)
        for column in range(7):
            cell = partition.locate(drift.values.numpy()[inside, column].astype(np.float32))
            np.testing.assert_array_equal(counts[slice, column], np.bincount(cell, minlength=partition.size))
    log_w = (drift.logprobs[:, 0] - drift.logprobs[:, 1]).numpy().clip(-64, 16).astype(np.float32)
    cell = log_partition.locate(log_w[np.arange(12) != 3])
    expected = np.bincount(cell, minlength=log_partition.size)
    np.testing.assert_array_equal(counters.log_counts.sum(0).numpy(), expected)


@pytest.mark.slow
@PASSES
def test_shards_of_the_vocabulary_merge_into_the_whole(failed, monkeypatch):
    """Parts of any width, one of them without a token that has mass, give what the whole gives."""
    monkeypatch.setattr(logit_passes, "_failed", failed)
    train, inference = pair(0.3, rows=6)
    train[:, 60:], inference[1:, 60:] = -math.inf, -math.inf
    train[4, 3], targets = math.nan, torch.tensor([0, 10, 11, 59, 60, 89])
    whole = device_drift(train, inference, targets=targets, top=3)
    bounds = [(0, 11), (11, 12), (12, 60), (60, 90)]
    parts = [logit_passes.LogitRows.of(train[:, a:b], inference[:, a:b], None, targets, 3, before=a) for a, b in bounds]
    found = merged([part.first_pass() for part in parts])
    sums = torch.stack([part.second_pass(found) for part in parts]).sum(0)
    drift = logit_device._finished(found, sums, 3)
    torch.testing.assert_close(drift.values, whole.values, rtol=1e-6, atol=1e-7, equal_nan=True)
    good = [0, 1, 2, 3, 5]
    torch.testing.assert_close(drift.logprobs[good], whole.logprobs[good])
    assert drift.top.tokens[good].tolist() == whole.top.tokens[good].tolist()
    torch.testing.assert_close(drift.top.tail[good], whole.top.tail[good], rtol=1e-5, atol=1e-12)


RANK = """
import sys, torch
from torch import distributed
from kc_otel.record.measure.logit_device import device_drift, sharded_drift
rank = int(sys.argv[1])
store = distributed.FileStore(sys.argv[2], 2)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
inference = 3 * torch.randn((4, 60), generator=generator)
train = inference + 0.2 * torch.randn((4, 60), generator=generator)
targets = torch.tensor([0, 29, 30, 59])
whole = device_drift(train, inference, targets=targets, top=3)
part = slice(30 * rank, 30 * rank + 30)
drift = sharded_drift(train[:, part], inference[:, part], targets=targets, top=3)
torch.testing.assert_close(drift.values, whole.values, rtol=1e-6, atol=1e-7)
torch.testing.assert_close(drift.logprobs, whole.logprobs)
assert drift.top.tokens.tolist() == whole.top.tokens.tolist()
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_hold_parts_of_the_vocabulary_agree_with_one_that_holds_it_all(tmp_path):
    """Two processes over gloo, each with half of every row."""
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


@PASSES
def test_hidden_states_and_heads_are_compared_a_few_rows_at_a_time(failed, monkeypatch):
    """The same as of their logits, and no logits of more than `rows` rows exist."""
    monkeypatch.setattr(logit_passes, "_failed", failed)
    generator = torch.Generator().manual_seed(0)
    h, head = torch.randn((7, 8), generator=generator), torch.randn((50, 8), generator=generator)
    other = head + 0.05 * torch.randn((50, 8), generator=generator)
    targets, seen = torch.arange(7), []
    whole = device_drift(h @ head.T, h @ other.T, targets=targets, top=2)
    monkeypatch.setattr(
        logit_device, "device_drift", lambda *z, **more: seen.append(z[0].shape) or device_drift(*z, **more)
    )
    drift = hidden_drift((h, head), (h, other), targets=targets, top=2, rows=3)
    assert [tuple(shape) for shape in seen] == [(3, 50), (3, 50), (1, 50)]
    torch.testing.assert_close(drift.values, whole.values, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(drift.logprobs, whole.logprobs)
    assert drift.top.tokens.tolist() == whole.top.tokens.tolist()
    assert hidden_drift((h[:0], head), (h[:0], other)).values.shape == (0, 7)


@pytest.mark.slow
def test_a_vocabulary_of_262144(monkeypatch):
    """One row of it, whose last token is the target and the most likely; with more lanes than on a GPU, to be quick."""
    monkeypatch.setattr(logit_passes, "_LANES", 8192)
    train, inference = pair(0.05, rows=1, vocab=1 << 18)
    train[0, -1] = 40.0
    drift = device_drift(train, inference, targets=[(1 << 18) - 1], top=1)
    np.testing.assert_allclose(drift.values, exact(train, inference), rtol=2e-5, atol=1e-6)
    assert drift.top.tokens[0, 0].tolist() == [(1 << 18) - 1]
    torch.testing.assert_close(drift.logprobs[0, 0], train.double().log_softmax(-1)[0, -1], rtol=1e-6, atol=1e-6)


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
        np.testing.assert_allclose(device_drift(left, right).values, exact(*flat), rtol=1e-5, atol=1e-6)


def test_a_kernel_that_fails_is_said_once_and_torch_does_the_work(monkeypatch, caplog):
    """Whoever is watched notices nothing, and the log says why it is slower, once."""
    train, inference = pair(0.1)
    kernel = logit_passes._kernel()
    monkeypatch.setattr(logit_passes, "_failed", [])
    monkeypatch.setattr(kernel, "drift_kernel", None)
    for _ in range(2):
        values = logit_drift(train, inference, _tensors=True).values
        np.testing.assert_allclose(values, exact(train, inference), rtol=1e-4, atol=1e-6)
    assert [record.getMessage() for record in caplog.records] == [
        "logits are compared by torch: the Triton kernel failed"
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda z: device_drift(z, z[:, :-1]), r"inference: shape \(5, 89\)"),
        (lambda z: device_drift(z[0], z[0]), r"not \[..., vocab\]"),
        (lambda z: device_drift(z[:, :0], z[:, :0]), r"not \[..., vocab\]"),
        (lambda z: device_drift(z, z, targets=torch.zeros(4)), "targets: 4 for 5 rows"),
        (lambda z: device_drift(z.cfloat(), z.cfloat()), "complex numbers"),
        (lambda z: device_drift(z.double(), z, top=1), "top: there is none of float64"),
        (lambda z: device_drift(z, z.to("meta")), "inference: on meta, but train is on cpu"),
    ],
)
def test_what_cannot_be_compared_is_refused(make, said):
    """The message names the argument."""
    with pytest.raises(ValueError, match=said):
        make(pair(0.1)[0])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kc_otel.record.measure.logit_kernel import drift_kernel
names = drift_kernel.arg_names
longs = dict.fromkeys(["rows_train", "rows_inference", "targets", "best", "group", "counts", "log_counts"], "*i64")
doubles = dict.fromkeys(["of_targets", "first", "second"], "*fp64")
types = dict.fromkeys(names, "i32") | longs | doubles | dict.fromkeys(["edges", "log_edges"], "*fp32")
types |= {"train": "*bf16", "inference": "*fp16"}
for scan, measure in ((True, True), (True, False), (False, True)):
    both = scan and measure
    known = dict(SCAN=scan, MEASURE=measure, TARGETS=scan, TOP=8, COUNT=both, ALIGNED=both, BLOCK=1024)
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
