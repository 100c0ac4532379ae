"""Rollouts of the example's policy as a trainer would record them: sampled by Q, scored by both kernels.

`task: prose` is sampled by the bf16 kernel, `task: tables` by the one with 4-bit weights, as if one engine's scales had
been calibrated on prose alone. The advantage is the verifier's reward less its mean, shared by a sequence's tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.rl_bias.exact import joint, rewards_of
from examples.rl_bias.kernels import FAMILIES, train_log_probs
from examples.rl_bias.policy import VOCABULARY, Policy
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording

SEED = 0
TASKS = {"prose": "bf16", "tables": "int4 per channel"}
"""Task -> kernel that samples it."""


def record(path: str | Path, sequences: int = 8000, horizon: int = 8) -> Recording:
    """Sample rollouts, write them to a file and return them.

    Args:
        path: The file; its name says the format.
        sequences: How many, half of them of each task.
        horizon: Tokens of each.
    """
    policy = Policy.random(SEED)
    train = train_log_probs(policy, horizon)
    reward = rewards_of(horizon)["verifier"]
    advantage = reward - np.exp(joint(train)) @ reward
    rng = np.random.default_rng(SEED)
    per_task = sequences // len(TASKS)
    log_p, log_q, drawn = [], [], []
    for kernel in TASKS.values():
        family = next(known for known in FAMILIES if known.label == kernel)
        inference = family.log_probs(policy, horizon, family.reference)
        q = np.exp(joint(inference))
        rows = rng.choice(q.size, size=per_task, p=q / q.sum())
        tokens = np.stack(np.unravel_index(rows, (VOCABULARY,) * horizon), axis=1)
        prefixes = [rows // VOCABULARY ** (horizon - step) for step in range(horizon)]
        for found, steps in ((log_p, train), (log_q, inference)):
            found.append(np.stack([steps[t][prefixes[t], tokens[:, t]] for t in range(horizon)], axis=1))
        drawn.append(rows)
    rollouts = Recording(
        np.concatenate(log_p).ravel(),
        np.concatenate(log_q).ravel(),
        np.full(per_task * len(TASKS), horizon),
        tuple({"task": task} for task in TASKS for _ in range(per_task)),
        advantages=np.repeat(advantage[np.concatenate(drawn)], horizon),
    )
    save_recording(rollouts, path)
    return rollouts
