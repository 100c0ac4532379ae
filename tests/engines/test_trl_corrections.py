"""A line to paste into GRPOConfig does in TRL what was measured of a recording."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from kc_otel.offline.corrections import Ratios, catalogue, line, weights  # noqa: E402
from kc_otel.recordings.recording import Recording  # noqa: E402


@pytest.fixture
def recording():
    """Sixteen sequences with log ratios of all sizes, some of them with negative advantages."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 9, 16)
    log_w = rng.standard_normal(lengths.sum()) * rng.choice([0.003, 0.05, 0.3, 1.0], lengths.sum())
    advantages = np.repeat(rng.choice([-1.0, 0.0, 1.0], lengths.size), lengths)
    return Recording(log_w - 5.0, np.full(log_w.size, -5.0), lengths, ({},) * lengths.size, advantages=advantages)


def padded(of, values):
    """[S, T] and the mask, as trainers hold them."""
    mask = np.arange(of.lengths.max()) < of.lengths[:, None]
    found = np.zeros(mask.shape)
    found[mask] = values
    return found, mask


def test_a_line_for_trl_makes_a_config_that_weighs_as_measured(recording, tmp_path):
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    ratios = Ratios(recording)
    log_w, mask = (torch.tensor(array) for array in padded(recording, ratios.log_w))
    advantages = torch.tensor(recording.advantages[recording.starts])[:, None]
    tried = 0
    lines = [(found, line("trl", found)) for found in catalogue(advantages=True)]
    for correction, text in [(found, text) for found, text in lines if text is not None][::4]:
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **eval(f"dict({text})"))
        ratio = torch.ones_like(log_w)
        if config.vllm_importance_sampling_correction:
            level, edge = config.vllm_importance_sampling_mode.split("_")
            ratio = (log_w.sum(1, keepdim=True).expand_as(log_w) if level == "sequence" else log_w).exp()
            low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
            if edge == "truncate":
                ratio = ratio.clamp(min=low, max=high)
            else:
                ratio = ratio.masked_fill((ratio < (low or -math.inf)) | (ratio > high), 0.0)
        if config.off_policy_mask_threshold is not None:
            ratio = ratio * GRPOTrainer.get_off_policy_mask(
                advantages, log_w, torch.zeros_like(log_w), mask.to(log_w.dtype), config.off_policy_mask_threshold
            )
        assert ratio[mask].numpy() == pytest.approx(weights(ratios, correction), rel=1e-6), text
        tried += 1
    assert tried > 12
