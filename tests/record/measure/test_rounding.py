"""Log-probabilities that one side kept in half precision are told from honest ones, and honest ones from them."""

import re

import numpy as np
import pytest

from kc_otel.record.measure.rounding import coarse_side
from tests.tools.planted_faults import bfloat16


def float16(values):
    return np.asarray(values).astype(np.float16).astype(np.float32)


def logprobs(rng, tokens=400, dtype=np.float32, logits=np.asarray):
    """Log-probabilities of sampled tokens by a log-softmax in `dtype` over logits that `logits` rounds."""
    z = logits((rng.standard_normal((tokens, 64)) * 3.0).astype(dtype)).astype(dtype)
    z -= z.max(axis=1, keepdims=True)
    normal = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    chosen = (rng.gumbel(size=z.shape) + normal).argmax(axis=1)
    return normal[np.arange(tokens), chosen]


def nats_of(said):
    """The mean |log ratio| of a sentence, of one digit."""
    return float(re.search(r"about (\S+) nats of mean", said)[1])


@pytest.mark.parametrize(("rounded", "grid"), [(bfloat16, "bfloat16"), (float16, "float16")])
@pytest.mark.parametrize("side", ["train", "inference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_side_that_was_rounded_is_named_with_its_grid_and_what_that_costs(rounded, grid, side, dtype):
    """Of two kernels that are the same one, everything that is left between them is the rounding that is named."""
    full = logprobs(np.random.default_rng(1), dtype=dtype)
    found = coarse_side(**{"train": full, "inference": full, side: rounded(full)})
    assert f"the {side} side all lie on {grid}'s grid" in found
    assert nats_of(found) == pytest.approx(np.abs(rounded(full) - full).mean(), rel=0.3)
    assert "float32 on both sides" in found


@pytest.mark.parametrize("step", [1 / 32, 1 / 16, 1 / 8])
def test_a_log_softmax_in_bfloat16_has_the_spacing_of_its_logits(step):
    """Logits of 4 to 32 are multiples of that, and so are their differences, near 0 too."""
    full = logprobs(np.random.default_rng(5), 1000)
    found = coarse_side(full, np.minimum(np.round(full / step) * step, 0).astype(np.float32))
    assert f"about {step / 4:.1g} nats" in found


def test_of_two_grids_the_coarser_is_named():
    full = logprobs(np.random.default_rng(2))
    assert "the inference side all lie on bfloat16's grid" in coarse_side(float16(full), bfloat16(full))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [40, 400])
def test_honest_numbers_are_never_named(tokens):
    """Of many: float32, float64, one of each, and a float32 log-softmax over logits in half precision."""
    rng = np.random.default_rng(3)
    for _ in range(500 if tokens < 100 else 60):
        single, other = (logprobs(rng, tokens) for _ in range(2))
        double = logprobs(rng, tokens, np.float64)
        coarse = logprobs(rng, tokens, logits=bfloat16), logprobs(rng, tokens, logits=float16)
        for rounded in (bfloat16, float16):
            assert coarse_side(rounded(single), rounded(other)) == ""
        for train, inference in ((single, other), (single, double), (double, single), coarse, (coarse[0], double)):
            assert coarse_side(train, inference) == ""


@pytest.mark.parametrize(
    "full",
    [
        np.linspace(-3.0, -0.6, 31),
        np.repeat(np.linspace(-3.0, -0.6, 31), 100),
        np.linspace(-0.4, -1e-7, 1000),
        np.full(1000, -np.inf),
        np.full(1000, np.nan),
        np.zeros(0),
    ],
    ids=["few", "repeated", "sure", "infinite", "nan", "none"],
)
def test_too_little_to_tell_is_said_of_nothing(full):
    assert coarse_side(bfloat16(full), full) == ""
