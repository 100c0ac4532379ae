"""llama.cpp's KL-divergence table, against a loop over tokens as its C++ has it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.offline.compare_log.definitions.llama_cpp import FEWEST, Printed, table


def stored(row):
    """One row of base log-probabilities as llama.cpp writes and reads them, in plain Python."""
    top, bottom = max(row), max(min(row), max(row) - 16)
    log_sum = math.log(math.fsum(math.exp(z - top) for z in row))
    scale = (top - bottom) / 65535
    codes = [round((z - bottom) / scale) if z > bottom and scale else 0 for z in row]
    return [scale * code + (bottom - top - log_sum) for code in codes]


def by_hand(base, other, tokens):
    """The statistics, token by token."""
    nll, nll_base, kld, p_diff, same = [], [], [], [], 0
    for zp, zq, y in zip(base.tolist(), other.tolist(), tokens.tolist(), strict=True):
        log_p = stored(zp)
        top = max(zq)
        log_q = [z - top - math.log(math.fsum(math.exp(x - top) for x in zq)) for z in zq]
        nll.append(-log_q[y])
        nll_base.append(-log_p[y])
        kld.append(math.fsum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True) if p > -16))
        p_diff.append(math.exp(log_q[y]) - math.exp(log_p[y]))
        same += log_q.index(max(log_q)) == log_p.index(max(log_p))
    return nll, nll_base, kld, p_diff, same


def uncertain(values):
    n = len(values)
    f = math.fsum(values) / n
    spread = math.fsum(v * v for v in values) / n - f * f
    return f, math.sqrt(spread / (n - 1)) if spread > 0 and n > 10 else 0.0


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(3, 50), st.sampled_from([0.01, 0.3, 3.0]))
@settings(deadline=None, max_examples=40)
def test_the_table_is_llama_cpps(seed, rows, vocab, drift):
    """Every line that has a mean or an extreme, and its standard error, agrees with the loop."""
    rng = np.random.default_rng(seed)
    base = 6 * rng.standard_normal((rows, vocab))
    other = base + drift * rng.standard_normal((rows, vocab))
    tokens = rng.integers(vocab, size=rows)
    nll, nll_base, kld, p_diff, same = by_hand(base, other, tokens)
    (f, df), (g, dg), n = uncertain(nll), uncertain(nll_base), rows
    covariance = (
        (math.fsum(a * b for a, b in zip(nll, nll_base, strict=True)) / n - f * g) / (n - 1) if n >= 10 else 0.0
    )
    spread = math.sqrt(max(df**2 + dg**2 - 2 * covariance, 0))
    ppl, base_ppl, (square, d_square) = math.exp(f), math.exp(g), uncertain([d * d for d in p_diff])
    expected = {
        "Mean PPL(Q)": (ppl, ppl * df),
        "Mean PPL(base)": (base_ppl, base_ppl * dg),
        "Mean ln(PPL(Q)/PPL(base))": (f - g, spread),
        "Mean PPL(Q)/PPL(base)": (math.exp(f - g), math.exp(f - g) * spread),
        "Mean PPL(Q)-PPL(base)": (
            ppl - base_ppl,
            math.sqrt(max((ppl * df) ** 2 + (base_ppl * dg) ** 2 - 2 * ppl * base_ppl * covariance, 0)),
        ),
        "Mean KLD": uncertain(kld),
        "Maximum KLD": (max(kld), None),
        "Minimum KLD": (min(kld), None),
        "Mean Δp": tuple(100 * x for x in uncertain(p_diff)),
        "Maximum Δp": (100 * max(p_diff), None),
        "Minimum Δp": (100 * min(p_diff), None),
        "RMS Δp": (100 * math.sqrt(square), 100 * 0.5 / math.sqrt(square) * d_square),
        "Same top p": (100 * same / n, 100 * math.sqrt(same / n * (1 - same / n) / (n - 1))),
    }
    found = table(base, other, tokens)
    for label, (value, error) in expected.items():
        assert found[label].value == pytest.approx(value, rel=1e-6, abs=1e-8), label
        # a standard error is a difference of nearly equal squares
        scale = 1e-6 * max(1.0, abs(value))
        assert (found[label].error is None) == (error is None), label
        assert found[label].error == pytest.approx(error, rel=1e-5, abs=scale) if error is not None else True, label
    if df * dg > 1e-9:
        cor = found["Cor(ln(PPL(Q)), ln(PPL(base)))"].value
        assert cor == pytest.approx(100 * covariance / (df * dg), rel=1e-4, abs=1e-4)


def test_quantiles_interpolate_between_neighbours():
    """The lines in between: llama.cpp's percentile over the sorted values, and the median of an even number."""
    rng = np.random.default_rng(1)
    base = rng.standard_normal((500, 20))
    other, tokens = base + 0.2 * rng.standard_normal(base.shape), rng.integers(20, size=500)
    *_, kld, p_diff, _ = by_hand(base, other, tokens)
    found = table(base, other, tokens)
    for name, values, scale, ranks in (
        ("KLD", kld, 1, (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)),
        ("Δp", p_diff, 100, (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)),
    ):
        for rank in ranks:
            expected = scale * np.quantile(values, rank / 100)
            assert found[f"{rank:.1f}% {name}"].value == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert found[f"Median {name}"].value == pytest.approx(scale * np.median(values), rel=1e-6)


def test_the_labels_are_in_llama_cpps_order():
    """What the tool prints, from perplexity to same top p."""
    rng = np.random.default_rng(2)
    labels = list(table(rng.standard_normal((12, 4)), rng.standard_normal((12, 4)), rng.integers(4, size=12)))
    assert labels[0] == "Mean PPL(Q)"
    assert labels[6:9] == ["Mean KLD", "Maximum KLD", "99.9% KLD"]
    assert labels[-3:] == ["Minimum Δp", "RMS Δp", "Same top p"]
    assert len(labels) == 34


def test_the_base_is_the_training_kernel():
    """Mean KLD is KL(train||inference), without the 16-bit storage to many digits, as torch computes it."""
    rng = np.random.default_rng(3)
    train, inference = rng.standard_normal((2, 300, 50))
    p, q = (torch.log_softmax(torch.from_numpy(z), -1) for z in (train, inference))
    tokens = rng.integers(50, size=300)
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    found = table(train, inference, tokens, sixteen_bits=False)
    assert found["Mean KLD"].value == pytest.approx(float(exact), rel=1e-9)
    assert found["Mean PPL(base)"].value == pytest.approx(math.exp(-p[np.arange(300), tokens].mean()), rel=1e-9)
    assert found["Mean KLD"].value != pytest.approx(table(inference, train, tokens)["Mean KLD"].value, rel=1e-3)


def test_sixteen_bits_leave_a_floor():
    """A model against itself: exactly 0 in full precision, a small KLD from llama.cpp's storage."""
    logits = 4 * np.random.default_rng(4).standard_normal((200, 64))
    tokens = np.zeros(200, dtype=int)
    assert table(logits, logits, tokens, sixteen_bits=False)["Mean KLD"].value == 0.0
    floor = table(logits, logits, tokens)
    assert 0 < floor["Maximum KLD"].value < 1e-3
    assert floor["Same top p"] == Printed(100.0, 0.0)


def test_what_lies_16_nats_below_does_not_count():
    """A token of probability exp(-17) on the base's side adds nothing, however rare it is on the other's."""
    base, other = np.array([[0.0, 0.0, -17.0]]), np.array([[0.0, 0.0, -60.0]])
    found = table(base, other, [0], sixteen_bits=False)["Mean KLD"].value
    assert abs(found) < 1e-6
    assert FEWEST == 100


@pytest.mark.parametrize(("rows", "known"), [(9, False), (10, True), (11, True)])
def test_few_tokens_have_llama_cpps_errors(rows, known):
    """Errors of means begin at eleven tokens, the covariance at ten: at ten, it alone makes the ratio's error."""
    wave = np.where(np.arange(rows) % 2, 1.0, -1.0)
    base, other = (np.stack([sign * wave, np.zeros(rows)], axis=1) for sign in (1.0, -1.0))
    found = table(base, other, np.zeros(rows, dtype=int), sixteen_bits=False)
    assert (found["Mean PPL(Q)"].error == 0.0) == (rows <= 10)
    assert (found["Mean ln(PPL(Q)/PPL(base))"].error > 0.0) == known


@pytest.mark.parametrize(
    ("train", "inference", "tokens", "message"),
    [
        (np.zeros(3), np.zeros(3), [0], r"train_logits: shape \(3,\)"),
        (np.zeros((0, 3)), np.zeros((0, 3)), [], r"train_logits: shape \(0, 3\)"),
        (np.zeros((1, 3)), np.zeros((1, 4)), [0], "inference_logits: shape"),
        (np.zeros((1, 3)), np.zeros((1, 3)), [0.0], "token_ids: float64"),
        (np.zeros((1, 3)), np.zeros((1, 3)), [3], r"token_ids: 3..3 is not within the vocabulary, 0..2"),
        (np.zeros((1, 3)), np.full((1, 3), -np.inf), [0], "inference_logits: row 0"),
    ],
)
def test_bad_logits_are_named(train, inference, tokens, message):
    """Shapes, tokens outside of the vocabulary and logits that are not finite."""
    with pytest.raises(ValueError, match=message):
        table(train, inference, tokens)
