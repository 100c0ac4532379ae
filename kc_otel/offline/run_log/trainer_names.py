"""Names under which trainers log what is compared here, and what a drift of theirs is counted in.

Each trainer's source, and the commit that its names are from, is in the handbook's reference on run logs.

Of mean differences: vLLM on a CPU against Transformers in float32, both of a small model, is 0.03 nats away in
bfloat16, 0.15 with an fp8 KV cache, 0.24 with fp8 weights, and 0.43 with the weights of one step ago at a learning rate
of 1e-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Role = Literal["drift", "k1", "ratio", "tail", "largest", "ess", "entropy", "reward", "lag"]
Unit = Literal["nats", "kl", "probability", "factor"]
ABSURD: Final[Mapping[Unit, float]] = {"nats": 0.25, "kl": 0.05, "probability": 0.1, "factor": 0.28}
"""Means from which on two kernels hardly score the same tokens with the same weights: of |log P - log Q|, of k1 or k3
(half of the square, for errors with a Laplace law), of |P - Q|, and of exp |log P - log Q| - 1."""

UNITS: Final[Mapping[str, Unit]] = {
    "rollout_corr/k3_kl": "kl",
    "training/rollout_probs_diff_mean": "probability",
    "sampling/sampling_logp_difference/mean": "nats",
    "mismatch_kl/all/mean": "kl",
    "gen_kl_error": "kl",
    "token_mult_prob_error": "factor",
    "train_rollout_logprob_abs_diff": "nats",
    "policy/rollout_train_logprobs_abs_diff_mean": "nats",
    "policy/minibatch_rollout_logprobs_abs_diff_mean": "nats",
    "behave_approx_kl/avg": "kl",
    "actor/train_infer_diff_token_mean": "probability",
    "debug/vllm_vs_local_logprob_diff_mean": "nats",
    "rollout_corr/kl": "kl",
    "vllm_kl": "kl",
}
"""Unit of each drift; a signed mean is a size too, where nothing else is."""

ROLES: Final[Mapping[Role, tuple[str, ...]]] = {
    "drift": tuple(UNITS),
    "k1": ("rollout_corr/kl", "vllm_kl"),
    "ratio": (
        "rollout_corr/rollout_is_mean", "sampling/importance_sampling_ratio/mean", "sampling_importance_ratio",
        "tis", "mis_tis_weight_before_bound", "is_ratio_mean", "behave_imp_weight/avg",
        "actor/train_infer_ratio_token_mean", "val/rho_weight",
    ),
    "tail": (
        "training/rollout_probs_diff_max", "sampling/sampling_logp_difference/max", "mismatch_kl/all/max",
        "policy/rollout_train_logprobs_abs_diff_max", "policy/minibatch_rollout_logprobs_abs_diff_max",
        "debug/vllm_vs_local_logprob_diff_max",
    ),
    "largest": ("training/rollout_probs_diff_max",),
    "ess": ("rollout_corr/rollout_is_eff_sample_size",),
    "entropy": (
        "actor/entropy", "entropy", "entropy/all/mean", "approx_entropy", "entropy_loss", "policy_entropy",
        "update/entropy/avg", "critic/entropy/mean", "policy/entropy_avg",
    ),
    "reward": (
        "critic/score/mean", "critic/rewards/mean", "reward", "reward/mean", "rollout/raw_reward",
        "reward/avg_raw_reward", "task_reward/avg", "score/mean", "scores",
    ),
    "lag": (
        "training/off_policy/trajectory_staleness/mean", "off_policy/mean", "off_policy_level",
        "version_stats/sample_staleness_proximal_avg", "weights_lag", "staleness",
    ),
}  # fmt: skip
"""Role -> every trainer's names of it, with any prefix, the one to prefer first."""
