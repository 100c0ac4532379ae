"""Other tools' mismatch metrics, against a second implementation of each on padded torch tensors or in plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.offline.compare_log.definitions import nemo_rl, prime_rl, trl, verl

TOKEN = st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.floats(-2, 2), st.booleans())
BATCH = st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=5).filter(
    lambda rows: any(kept for row in rows for *_, kept in row)
)
FAR = st.lists(
    st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=4), min_size=1, max_size=4
)


def packed(rows):
    """train, inference, lengths of the tokens that the mask keeps."""
    train = [t for row in rows for t, _, _, kept in row if kept]
    inference = [i for row in rows for _, i, _, kept in row if kept]
    return np.array(train), np.array(inference), np.array([sum(kept for *_, kept in row) for row in rows])


def padded(rows):
    """train, inference, advantages, mask [S, T] in torch; what the mask hides is garbage."""
    width = max(map(len, rows))
    shape = (len(rows), width)
    train, inference, advantages = (torch.full(shape, value, dtype=torch.float64) for value in (-77.0, -3.0, 9.0))
    mask = torch.zeros(shape, dtype=torch.int64)
    for s, row in enumerate(rows):
        for t, (p, q, a, kept) in enumerate(row):
            train[s, t], inference[s, t], advantages[s, t], mask[s, t] = p, q, a, kept
    return train, inference, advantages, mask


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def agree(found, expected):
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(BATCH)
def test_verl_metrics_are_token_means_and_means_of_sequence_means(rows):
    """kl, k3 and chi2_token weigh tokens alike; perplexities weigh sequences alike, masked-out ones as perplexity 1."""
    train, inference, _, mask = padded(rows)
    count = mask.sum(-1)
    kept = mask.bool()
    p, q = train[kept].tolist(), inference[kept].tolist()
    m_p = [float((train[s][kept[s]]).sum() / count[s]) if count[s] else 0.0 for s in range(len(rows))]
    m_q = [float((inference[s][kept[s]]).sum() / count[s]) if count[s] else 0.0 for s in range(len(rows))]
    sums = [float((train[s][kept[s]] - inference[s][kept[s]]).sum()) for s in range(len(rows))]
    gap = [b - a for a, b in zip(m_p, m_q, strict=True)]
    expected = {
        "kl": mean(b - a for a, b in zip(p, q, strict=True)),
        "k3_kl": mean(math.exp(a - b) - (a - b) - 1 for a, b in zip(p, q, strict=True)),
        "training_ppl": mean(math.exp(-m) for m in m_p),
        "training_log_ppl": mean(-m for m in m_p),
        "rollout_ppl": mean(math.exp(-m) for m in m_q),
        "rollout_log_ppl": mean(-m for m in m_q),
        "log_ppl_diff": mean(gap),
        "log_ppl_abs_diff": mean(map(abs, gap)),
        "log_ppl_diff_max": max(gap),
        "log_ppl_diff_min": min(gap),
        "ppl_ratio": mean(map(math.exp, gap)),
        "chi2_token": mean(math.exp(a - b) ** 2 for a, b in zip(p, q, strict=True)) - 1,
        "chi2_seq": mean(math.exp(2 * min(max(L, -20), 20)) for L in sums) - 1,
    }
    agree(verl.offpolicy_metrics(*packed(rows)), {f"rollout_corr/{k}": v for k, v in expected.items()})


@given(FAR)
def test_verl_clamps_log_ratios_at_20_before_it_squares_them(rows):
    """chi-square saturates at exp(40) - 1 per token and per sequence; k3 does not saturate."""
    tokens = [[(p, q, 0.0, True) for p, q in row] for row in rows]
    found = verl.offpolicy_metrics(*packed(tokens))
    clamped = [min(max(p - q, -20.0), 20.0) for row in rows for p, q in row]
    sums = [min(max(math.fsum(p - q for p, q in row), -20.0), 20.0) for row in rows]
    assert found["rollout_corr/chi2_token"] == pytest.approx(
        mean(math.exp(c) ** 2 for c in clamped) - 1, rel=1e-9, abs=1e-9
    )
    assert found["rollout_corr/chi2_seq"] == pytest.approx(mean(math.exp(2 * c) for c in sums) - 1, rel=1e-9, abs=1e-9)
    k3 = mean(math.exp(p - q) - (p - q) - 1 for row in rows for p, q in row)
    assert found["rollout_corr/k3_kl"] == pytest.approx(k3, rel=1e-9, abs=1e-9)


@given(BATCH, st.sampled_from(["token", "sequence"]), st.floats(1.1, 5))
def test_verl_importance_weights_are_truncated_before_they_are_averaged(rows, level, threshold):
    """Mean, std, ESS are of the truncated weights, spread over tokens; max and min of a sequence are of the raw one."""
    train, inference, _, mask = padded(rows)
    kept = mask.bool()
    log_ratio = torch.where(kept, train - inference, torch.zeros(()).double())
    sums = log_ratio.sum(-1, keepdim=True)
    raw = (log_ratio if level == "token" else sums.expand_as(log_ratio)).clamp(-20, 20).exp() * mask
    cut = raw.clamp(max=threshold)
    w = cut[kept]
    seq = torch.stack([c[k].mean() if k.any() else torch.zeros(()).double() for c, k in zip(cut, kept, strict=True)])
    raw_seq = torch.stack(
        [c[k].mean() if k.any() else torch.zeros(()).double() for c, k in zip(raw, kept, strict=True)]
    )
    whole = level == "sequence"
    over = (sums > math.log(threshold)) if whole else raw[kept] > threshold
    under = (sums < math.log(1 / threshold)) if whole else raw[kept] < 1 / threshold
    expected = {
        "mean": w.mean(),
        "max": sums.max().clamp(max=20).exp() if whole else w.max(),
        "min": sums.min().exp() if whole else w.min(),
        "std": w.std(unbiased=False) if w.numel() > 1 else 0.0,
        "ratio_fraction_high": over.double().mean(),
        "ratio_fraction_low": under.double().mean(),
        "eff_sample_size": 1 / ((w / (w.mean() + 1e-8)) ** 2).mean(),
        "seq_mean": seq.mean(),
        "seq_std": seq.std() if seq.numel() > 1 else 0.0,
        "seq_max": seq.max(),
        "seq_min": seq.min(),
        "seq_max_deviation": (seq - 1).abs().max(),
        "seq_fraction_high": (raw_seq > threshold).double().mean(),
        "seq_fraction_low": (raw_seq < 1 / threshold).double().mean(),
    }
    found = verl.importance_weights(*packed(rows), level=level, threshold=threshold)
    assert found == pytest.approx(
        {f"rollout_corr/rollout_is_{k}": float(v) for k, v in expected.items()}, rel=1e-9, abs=1e-7
    )


@given(BATCH, st.sampled_from(["k1", "k2", "k3"]))
def test_nemo_rl_metrics_are_token_means(rows, kind):
    """exp|l|, both KL errors in the chosen estimate, the mixture's divergence and the ratio, over all tokens."""
    estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    p, q, lengths = packed(rows)

    def js(a, b):
        m = math.log(0.5 * math.exp(a) + 0.5 * math.exp(b))
        return 0.5 * (math.exp(a - m) - (a - m) - 1) + 0.5 * (math.exp(b - m) - (b - m) - 1)

    pairs = list(zip(p.tolist(), q.tolist(), strict=True))
    expected = {
        "token_mult_prob_error": mean(math.exp(abs(b - a)) for a, b in pairs),
        "gen_kl_error": mean(estimate[kind](a - b) for a, b in pairs),
        "policy_kl_error": mean(estimate[kind](b - a) for a, b in pairs),
        "js_divergence_error": mean(js(a, b) for a, b in pairs),
        "sampling_importance_ratio": mean(math.exp(a - b) for a, b in pairs),
    }
    agree(nemo_rl.metrics(p, q, lengths, kl_type=kind), expected)


@given(BATCH)
def test_nemo_rl_sequence_ratio_is_the_mean_product(rows):
    """At sequence level each sequence counts once, with the product of its ratios."""
    expected = mean(math.exp(math.fsum(p - q for p, q, _, kept in row if kept)) for row in rows)
    found = nemo_rl.metrics(*packed(rows), sequence_level=True)["sampling_importance_ratio"]
    assert found == pytest.approx(expected, rel=1e-9)


def test_nemo_rl_counts_a_weight_beyond_float32_as_nothing():
    """exp(89) is infinite in float32, which NeMo-RL turns into 0; exp(88) is not."""
    ratio = "sampling_importance_ratio"
    assert nemo_rl.metrics([0.0], [-89.0], [1])[ratio] == 0.0
    assert nemo_rl.metrics([0.0], [-88.0], [1])[ratio] == pytest.approx(math.exp(88))


@given(
    BATCH,
    st.sampled_from(["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
    st.one_of(st.none(), st.floats(0.1, 0.9)),
    st.one_of(st.none(), st.floats(1.1, 4)),
)
def test_trl_ratio_is_averaged_after_clipping(rows, mode, low, high):
    """TRL's own tensor program on padded tensors: difference, ratio, truncation or mask, then min, mean and max."""
    train, inference, _, mask = padded(rows)
    kept = mask.bool()
    difference = (train - inference) * mask
    ratio = torch.exp(difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference)
    if mode.endswith("truncate"):
        if low is not None or high is not None:
            ratio = torch.clamp(ratio, min=low, max=high)
    else:
        outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
        ratio = ratio.masked_fill(outside, 0.0)
    flat = ratio.flatten() if mode.startswith("sequence") else ratio[kept]
    delta = (train - inference).abs()[kept]
    expected = {
        "sampling/sampling_logp_difference/mean": delta.mean(),
        "sampling/sampling_logp_difference/max": delta.max(),
        "sampling/importance_sampling_ratio/min": flat.min(),
        "sampling/importance_sampling_ratio/mean": flat.mean(),
        "sampling/importance_sampling_ratio/max": flat.max(),
    }
    found = trl.metrics(*packed(rows), mode=mode, clip_min=low, clip_max=high)
    agree(found, {key: float(value) for key, value in expected.items()})
    raw = trl.before_clipping(*packed(rows), level=mode.partition("_")[0])
    unclipped = trl.metrics(*packed(rows), mode=mode, clip_min=None, clip_max=None)
    agree(raw, {key: unclipped[key] for key in raw})


def test_trl_leaves_out_what_vllm_could_not_score():
    """A NaN of the sampling side is no difference, and its ratio is 1."""
    found = trl.metrics([-1.0, -1.0], [np.nan, -1.5], [2], mode="token_truncate")
    assert found["sampling/sampling_logp_difference/mean"] == 0.5
    assert found["sampling/importance_sampling_ratio/min"] == 1.0
    nothing = trl.metrics([-1.0], [np.nan], [1])
    assert nothing["sampling/sampling_logp_difference/max"] == 0.0


@given(BATCH, st.floats(0.05, 0.4), st.floats(0.05, 0.4))
@settings(deadline=None)
def test_prime_rl_masks_by_the_sign_of_the_advantage(rows, low, high):
    """mismatch_kl over tokens and over sequences; the companions per sequence, by prime-rl's masks in torch."""
    train, inference, advantages, mask = padded(rows)
    metrics = {}
    for p, q, a, kept in zip(train, inference, advantages, mask.bool(), strict=True):
        k3 = torch.exp(p - q) - (p - q) - 1
        gap = p.exp() - q.exp()
        dropped = torch.where(a > 0, gap > high, gap < -low)

        def safe(values, where):
            return float(values[where].double().sum() / max(int(where.sum()), 1))

        for name, value in {
            "mismatch_kl": safe(k3, kept),
            "masked_mismatch_kl": safe(k3, kept & dropped),
            "unmasked_mismatch_kl": safe(k3, kept & ~dropped),
            "is_masked": safe(dropped, kept),
            "is_masked_low": safe((a < 0) & (gap < -low), kept),
            "is_masked_high": safe((a > 0) & (gap > high), kept),
            "masked_advantage_positive": safe(a > 0, kept & dropped),
            "masked_advantage_negative": safe(a < 0, kept & dropped),
        }.items():
            metrics.setdefault(f"{name}/mean", []).append(value)
    tokens = (torch.exp(train - inference) - (train - inference) - 1)[mask.bool()]
    found = prime_rl.mismatch_kl(*packed(rows))
    assert found.pop("mismatch_kl/all/std") == pytest.approx(
        float(tokens.std()) if tokens.numel() > 1 else math.nan, abs=1e-9, nan_ok=True
    )
    agree(
        found,
        {f"mismatch_kl/all/{name}": float(getattr(tokens, name)()) for name in ("mean", "median", "min", "max")}
        | {"mismatch_kl/mean": mean(metrics.pop("mismatch_kl/mean"))},
    )
    weights = advantages[mask.bool()].numpy()
    masking = prime_rl.masking(*packed(rows), weights, mask_low=low, mask_high=high)
    agree(masking, {name: mean(values) for name, values in metrics.items()})


@given(BATCH)
def test_tools_agree_where_their_definitions_do(rows):
    """k1 - k3 = 1 - E[w] across verl and NeMo-RL; verl's k3, NeMo-RL's gen_kl_error and prime-rl's token mean agree."""
    arguments = packed(rows)
    of_verl, of_nemo, of_prime = (
        of(*arguments) for of in (verl.offpolicy_metrics, nemo_rl.metrics, prime_rl.mismatch_kl)
    )
    ratio = of_nemo["sampling_importance_ratio"]
    gap = of_verl["rollout_corr/kl"] - of_verl["rollout_corr/k3_kl"]
    assert gap == pytest.approx(1 - ratio, rel=1e-9, abs=1e-9)
    assert of_verl["rollout_corr/k3_kl"] == pytest.approx(of_nemo["gen_kl_error"], rel=1e-12)
    assert of_verl["rollout_corr/k3_kl"] == pytest.approx(of_prime["mismatch_kl/all/mean"], rel=1e-12)
    raw = trl.before_clipping(*arguments, level="token")
    assert raw["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratio, rel=1e-12)


def test_hand_computed():
    """Two sequences, of two tokens and one: l = ln 2, -ln 2 and 0."""
    train = np.log([0.5, 0.25, 0.5])
    inference = np.log([0.25, 0.5, 0.5])
    of_verl = verl.offpolicy_metrics(train, inference, [2, 1])
    assert of_verl["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-15)
    assert of_verl["rollout_corr/k3_kl"] == pytest.approx((2 + 0.5 + 1) / 3 - 1)
    assert of_verl["rollout_corr/chi2_token"] == pytest.approx((4 + 0.25 + 1) / 3 - 1)
    assert of_verl["rollout_corr/chi2_seq"] == pytest.approx(0.0, abs=1e-15)
    assert of_verl["rollout_corr/training_ppl"] == pytest.approx((math.sqrt(8) + 2) / 2)
    of_nemo = nemo_rl.metrics(train, inference, [2, 1])
    assert of_nemo["token_mult_prob_error"] == pytest.approx(5 / 3)
    assert of_nemo["sampling_importance_ratio"] == pytest.approx(3.5 / 3)
    of_trl = trl.metrics(train, inference, [2, 1], mode="token_truncate", clip_max=1.5)
    assert of_trl["sampling/importance_sampling_ratio/mean"] == pytest.approx((1.5 + 0.5 + 1) / 3)
    of_prime = prime_rl.mismatch_kl(train, inference, [2, 1])
    assert of_prime["mismatch_kl/mean"] == pytest.approx((0.25 + 0.0) / 2)
    weights = verl.importance_weights(train, inference, [2, 1])
    assert weights["rollout_corr/rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert weights["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx((3.5 / 3) ** 2 / (5.25 / 3), rel=1e-7)


def test_verl_counts_weights_beyond_the_threshold_and_its_reciprocal():
    """Of ratios 0.48, 0.52, 1.9 and 2.1 one is low and one is high at a threshold of 2, by token and by sequence."""
    ratios = np.log([0.48, 0.52, 1.9, 2.1])
    for level, lengths in (("token", [4]), ("sequence", [1, 1, 1, 1])):
        found = verl.importance_weights(ratios - 1, np.full(4, -1.0), lengths, level=level)
        assert found["rollout_corr/rollout_is_ratio_fraction_low"] == 0.25
        assert found["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25
    assert found["rollout_corr/rollout_is_seq_fraction_low"] == 0.25
    assert found["rollout_corr/rollout_is_seq_fraction_high"] == 0.25


@pytest.mark.parametrize("of", [verl.offpolicy_metrics, verl.importance_weights, nemo_rl.metrics, prime_rl.mismatch_kl])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], []), r"train: shape \(0,\)"),
        (([[-1.0]], [[-1.0]], [1]), r"train: shape \(1, 1\)"),
        (([-1.0], [-1.0, -2.0], [1]), r"inference: shape \(2,\) is not train's \(1,\)"),
        (([-1.0, -1.0], [-1.0, -2.0], [1]), "lengths: they add up to 1, but there are 2 tokens"),
        (([-1.0], [-1.0], [1.0]), "lengths: .* whole numbers"),
        (([-1.0], [-1.0], [2, -1]), "lengths: .* at least 0"),
        (([np.nan], [-1.0], [1]), "train: 1 of 1 are nan, the first at 0"),
        (([-1.0, -1.0], [-1.0, np.nan], [2]), "inference: 1 of 2 are nan, the first at 1"),
    ],
)
def test_bad_arguments_are_named(of, arguments, message):
    """Every definition refuses what it cannot average, and says which argument it was."""
    with pytest.raises(ValueError, match=message):
        of(*arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: verl.importance_weights(*a, level="batch"), "level: 'batch'"),
        (lambda a: verl.importance_weights(*a, threshold=0.0), "threshold: 0.0"),
        (lambda a: nemo_rl.metrics(*a, kl_type="k4"), "kl_type: 'k4'"),
        (lambda a: trl.metrics(*a, mode="none"), "mode: 'none'"),
        (lambda a: trl.metrics(*a, clip_min=4.0), "clip_min: 4.0"),
        (lambda a: trl.before_clipping(*a, level="batch"), "level: 'batch'"),
        (lambda a: prime_rl.masking(*a, [1.0, 2.0]), r"advantages: shape \(2,\)"),
        (lambda a: prime_rl.masking(*a, [np.nan]), "advantages: .* nan"),
    ],
)
def test_bad_options_are_named(call, message):
    """An option that a tool does not have is refused by name and value."""
    with pytest.raises(ValueError, match=message):
        call(([-1.0], [-1.0], [1]))
