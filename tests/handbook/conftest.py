"""A folder with what the handbook's readers have: a contract, recordings, batches of rollouts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.handbook.snippets import ROOT


def logprobs(drift: float, sequences: int = 64, tokens: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Training and inference log-probabilities [sequences, tokens] of tokens sampled from the inference kernel."""
    rng = np.random.default_rng(seed)
    inference = rng.standard_normal((sequences, tokens, 16))
    train = inference + drift * rng.standard_normal(inference.shape)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (train, inference))
    sampled = (np.exp(q).cumsum(-1) < rng.random((sequences, tokens, 1))).sum(-1, keepdims=True).clip(max=15)
    return np.take_along_axis(p, sampled, -1)[..., 0], np.take_along_axis(q, sampled, -1)[..., 0]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of what is run: the repository's contracts and examples, and a reader's own files."""
    for folder in ("contracts", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.png", "__pycache__"))
    shutil.copy(ROOT / "examples" / "ci" / "contract.yaml", tmp_path / "contract.yaml")
    for name, drift, seed in (("good", 0.02, 0), ("bad", 0.8, 1), ("rollouts", 0.2, 2)):
        train, inference = logprobs(drift, sequences=256, tokens=48, seed=seed)
        task = np.array(["code", "prose"] * 128)
        np.savez(tmp_path / f"{name}.npz", train_logprobs=train, inference_logprobs=inference, task=task)
    monkeypatch.chdir(tmp_path)
    silent = {"OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": "none"}
    for variable, value in ({"COLUMNS": "100", "NO_COLOR": "1"} | silent).items():
        monkeypatch.setenv(variable, value)
    return tmp_path


def batches(count: int = 8) -> list[Any]:
    """Batches of rollouts as a trainer has them."""
    found = []
    for seed in range(count):
        train, inference = logprobs(0.05, sequences=4, tokens=32, seed=seed)
        lengths = [len(train[0])] * len(train)
        logits = np.random.default_rng(seed).normal(size=(*train.shape, 9))
        kept = logits >= np.sort(logits, -1)[..., [-6]]
        chosen, of_kept = logits.max(-1), np.logaddexp.reduce(np.where(kept, logits, -np.inf), -1)
        found.append(
            SimpleNamespace(
                train_logits=logits, sampling_mask=kept, processed_logprobs=chosen - of_kept,
                unprocessed_train_logprobs=chosen - np.logaddexp.reduce(logits, -1),
                train_logprobs=train, rollout_logprobs=inference, mask=np.ones(train.shape, bool),
                task=["code", "prose"] * 2, prompt=[4 * seed + row for row in range(4)], prompt_tokens=lengths,
                train_step=seed, inference_step=seed, advantages=np.full(train.shape, math.pi),
            )
        )  # fmt: skip
    return found


@pytest.fixture
def reader() -> dict[str, Any]:
    """What a reader has in hand before a page's first line of Python."""
    return {"rollouts": batches(), "SECRET": "whsec_c3VwZXItc2VjcmV0LWZvci10ZXN0cy1vbmx5ISE="}
