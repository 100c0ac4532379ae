"""Names under which trainers log what is compared here, and what a drift of theirs is counted in.

Sources:
- verl: verl-project/verl at 1dda039b9c63: trainer/ppo/rollout_corr_helper.py, utils/debug/metrics.py,
  trainer/ppo/core_algos.py, trainer/ppo/v1/trainer_base.py
- TRL and Unsloth: huggingface/trl at f2cd57710ae3: trainer/grpo_trainer.py; unslothai/unsloth at 015bdef0d94a:
  models/rl_replacements.py
- prime-rl: PrimeIntellect-ai/prime-rl at 559b44772e47: trainer/rl/train.py, trainer/utils.py,
  orchestrator/metrics.py, orchestrator/orchestrator.py
- NeMo-RL: NVIDIA-NeMo/RL at 7ea279abfbeb: nemo_rl/algorithms/loss/loss_functions.py, algorithms/grpo.py
- slime: THUDM/slime at 624b824a898a: slime/backends/megatron_utils/loss.py and model.py,
  examples/train_infer_mismatch_helper/mis.py
- SkyRL: NovaSky-AI/SkyRL at a9564572eb8e: skyrl/train/trainer.py, skyrl/backends/skyrl_train/workers/worker_utils.py,
  utils/off_policy_correction_utils.py
- AReaL: inclusionAI/AReaL at 4aef98d8d818: areal/trainer/ppo/actor.py, utils/functional/functional.py (its
  behave_approx_kl is log P - log Q, and is taken without its sign)
- OpenRLHF: OpenRLHF/OpenRLHF at 3c3be6234e0c: openrlhf/models/loss.py, trainer/ray/ppo_actor.py,
  utils/logging_utils.py
- ROLL: alibaba/ROLL at 8eb27cc2dc34: roll/utils/train_infer_corrections.py, utils/tracking.py,
  pipeline/rlvr/actor_worker.py, pipeline/agentic/agentic_pipeline.py
- Open-Instruct: allenai/open-instruct at e6c3044aa620: open_instruct/grpo_utils.py, grpo_fast.py, data_loader.py

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
