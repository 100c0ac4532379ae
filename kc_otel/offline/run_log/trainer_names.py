"""Names under which trainers log what is compared here, each table from the trainer's source at the commit it names.

A number's unit decides the level that no two kernels of the same weights have. Of mean differences: vLLM on a CPU
against Transformers in float32, both of a small model, is 0.03 nats away in bfloat16, 0.15 with an fp8 KV cache, 0.24
with fp8 weights, and 0.43 with the weights of one step ago at a learning rate of 1e-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

Role = Literal["drift", "k1", "ratio", "tail", "largest", "ess", "clipped", "entropy", "reward", "lag"]
Unit = Literal["nats", "kl", "probability", "factor"]
ABSURD: Final[Mapping[Unit, float]] = {"nats": 0.25, "kl": 0.05, "probability": 0.1, "factor": 0.28}
"""Means from which on two kernels hardly score the same tokens with the same weights: of |log P - log Q|, of k1 or k3
(half of the square, for errors with a Laplace law), of |P - Q|, and of exp |log P - log Q| - 1."""


@dataclass(frozen=True, slots=True)
class TrainerNames:
    """Names that one trainer logs, with any prefix, by role, the one to prefer first, and their source."""

    trainer: str
    source: str
    names: Mapping[Role, tuple[str, ...]]


TRAINERS: Final = (
    TrainerNames(
        "verl",
        "verl-project/verl at 1dda039b9c63: trainer/ppo/rollout_corr_helper.py, utils/debug/metrics.py, "
        "trainer/ppo/core_algos.py, trainer/ppo/v1/trainer_base.py",
        {
            "drift": ("rollout_corr/k3_kl", "training/rollout_probs_diff_mean"), "k1": ("rollout_corr/kl",),
            "ratio": ("rollout_corr/rollout_is_mean",), "tail": ("training/rollout_probs_diff_max",),
            "largest": ("training/rollout_probs_diff_max",), "ess": ("rollout_corr/rollout_is_eff_sample_size",),
            "clipped": ("actor/pg_clipfrac",), "entropy": ("actor/entropy",),
            "reward": ("critic/score/mean", "critic/rewards/mean"),
            "lag": ("training/off_policy/trajectory_staleness/mean",),
        },
    ),
    TrainerNames(
        "TRL and Unsloth",
        "huggingface/trl at f2cd57710ae3: trainer/grpo_trainer.py; unslothai/unsloth at 015bdef0d94a: "
        "models/rl_replacements.py",
        {
            "drift": ("sampling/sampling_logp_difference/mean",),
            "ratio": ("sampling/importance_sampling_ratio/mean",), "tail": ("sampling/sampling_logp_difference/max",),
            "clipped": ("clip_ratio/region_mean",), "entropy": ("entropy",), "reward": ("reward",),
        },
    ),
    TrainerNames(
        "prime-rl",
        "PrimeIntellect-ai/prime-rl at 559b44772e47: trainer/rl/train.py, trainer/utils.py, "
        "orchestrator/metrics.py, orchestrator/orchestrator.py",
        {
            "drift": ("mismatch_kl/all/mean",), "tail": ("mismatch_kl/all/max",), "clipped": ("is_masked/mean",),
            "entropy": ("entropy/all/mean",), "reward": ("reward/mean",),
            "lag": ("off_policy/mean", "off_policy_level"),
        },
    ),
    TrainerNames(
        "NeMo-RL",
        "NVIDIA-NeMo/RL at 7ea279abfbeb: nemo_rl/algorithms/loss/loss_functions.py, algorithms/grpo.py",
        {
            "drift": ("gen_kl_error", "token_mult_prob_error"), "ratio": ("sampling_importance_ratio",),
            "entropy": ("approx_entropy",), "reward": ("reward",),
        },
    ),
    TrainerNames(
        "slime",
        "THUDM/slime at 624b824a898a: slime/backends/megatron_utils/loss.py and model.py, "
        "examples/train_infer_mismatch_helper/mis.py",
        {
            "drift": ("train_rollout_logprob_abs_diff",), "ratio": ("tis", "mis_tis_weight_before_bound"),
            "clipped": ("pg_clipfrac",), "entropy": ("entropy_loss",), "reward": ("rollout/raw_reward",),
        },
    ),
    TrainerNames(
        "SkyRL",
        "NovaSky-AI/SkyRL at a9564572eb8e: skyrl/train/trainer.py, "
        "skyrl/backends/skyrl_train/workers/worker_utils.py, utils/off_policy_correction_utils.py",
        {
            "drift": ("policy/rollout_train_logprobs_abs_diff_mean", "policy/minibatch_rollout_logprobs_abs_diff_mean"),
            "ratio": ("is_ratio_mean",),
            "tail": ("policy/rollout_train_logprobs_abs_diff_max", "policy/minibatch_rollout_logprobs_abs_diff_max"),
            "clipped": ("loss_metrics/clip_ratio", "ppo_clip_ratio"), "entropy": ("policy_entropy",),
            "reward": ("reward/avg_raw_reward",),
        },
    ),
    TrainerNames(
        "AReaL",
        "inclusionAI/AReaL at 4aef98d8d818: areal/trainer/ppo/actor.py, utils/functional/functional.py (its "
        "behave_approx_kl is log P - log Q, and is taken without its sign)",
        {
            "drift": ("behave_approx_kl/avg",), "ratio": ("behave_imp_weight/avg",),
            "clipped": ("update/clip_ratio/avg",), "entropy": ("update/entropy/avg",), "reward": ("task_reward/avg",),
            "lag": ("version_stats/sample_staleness_proximal_avg",),
        },
    ),
    TrainerNames(
        "OpenRLHF",
        "OpenRLHF/OpenRLHF at 3c3be6234e0c: openrlhf/models/loss.py, trainer/ray/ppo_actor.py, "
        "utils/logging_utils.py",
        {
            "k1": ("vllm_kl",), "clipped": ("ppo_clip_ratio",), "entropy": ("entropy_loss",), "reward": ("reward",),
        },
    ),
    TrainerNames(
        "ROLL",
        "alibaba/ROLL at 8eb27cc2dc34: roll/utils/train_infer_corrections.py, utils/tracking.py, "
        "pipeline/rlvr/actor_worker.py, pipeline/agentic/agentic_pipeline.py",
        {
            "drift": ("actor/train_infer_diff_token_mean",), "ratio": ("actor/train_infer_ratio_token_mean",),
            "clipped": ("actor/ppo_ratio_clipfrac",), "entropy": ("critic/entropy/mean",), "reward": ("score/mean",),
        },
    ),
    TrainerNames(
        "Open-Instruct",
        "allenai/open-instruct at e6c3044aa620: open_instruct/grpo_utils.py, grpo_fast.py, data_loader.py",
        {
            "drift": ("debug/vllm_vs_local_logprob_diff_mean",), "ratio": ("val/rho_weight",),
            "tail": ("debug/vllm_vs_local_logprob_diff_max",), "clipped": ("policy/clipfrac_avg",),
            "entropy": ("policy/entropy_avg",), "reward": ("scores",),
        },
    ),
)  # fmt: skip
"""Names of each trainer."""

_OWN_NAMES: Final[Mapping[Role, tuple[str, ...]]] = {"lag": ("weights_lag", "staleness")}


def _merged(role: Role) -> tuple[str, ...]:
    tables = (trainer.names for trainer in TRAINERS)
    # A signed mean is a size too, where nothing else is: it comes last.
    signed = (trainer.names.get("k1", ()) for trainer in TRAINERS) if role == "drift" else ()
    return tuple(dict.fromkeys(chain(*(names.get(role, ()) for names in tables), *signed, _OWN_NAMES.get(role, ()))))


ROLES: Final[Mapping[Role, tuple[str, ...]]] = {
    role: _merged(role)
    for role in ("drift", "k1", "ratio", "tail", "largest", "ess", "clipped", "entropy", "reward", "lag")
}  # fmt: skip
"""Role -> every trainer's names of it."""

UNITS: Final[Mapping[str, Unit]] = {
    "rollout_corr/k3_kl": "kl",
    "rollout_corr/kl": "kl",
    "training/rollout_probs_diff_mean": "probability",
    "sampling/sampling_logp_difference/mean": "nats",
    "mismatch_kl/all/mean": "kl",
    "gen_kl_error": "kl",
    "token_mult_prob_error": "factor",
    "train_rollout_logprob_abs_diff": "nats",
    "policy/rollout_train_logprobs_abs_diff_mean": "nats",
    "policy/minibatch_rollout_logprobs_abs_diff_mean": "nats",
    "behave_approx_kl/avg": "kl",
    "vllm_kl": "kl",
    "actor/train_infer_diff_token_mean": "probability",
    "debug/vllm_vs_local_logprob_diff_mean": "nats",
}
"""Unit of each drift."""
