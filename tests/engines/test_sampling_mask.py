"""Top-p and top-k on a real vLLM that says which tokens it kept: over them, the edge of the nucleus is no drift."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from kc_otel.recordings.request import KeptTokens
from kc_otel.recordings.scoring import hf_scorer

pytestmark = pytest.mark.slow


def test_what_vllm_kept_is_what_both_kernels_are_compared_over(tiny_model):
    from transformers import AutoModelForCausalLM

    command = [sys.executable, "-m", "tests.engines._sampling_mask_run", str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for record in found:
        assert record["kept"] == record["said"]
        assert all(token in kept for token, kept in zip(record["tokens"], record["kept"], strict=True))
    kept = [
        KeptTokens(np.concatenate(record["kept"]), np.array([len(of_token) for of_token in record["kept"]]))
        for record in found
    ]
    score = hf_scorer(AutoModelForCausalLM.from_pretrained(tiny_model))
    prompts, tokens = [record["prompt"] for record in found], [record["tokens"] for record in found]
    scored = score(prompts, tokens, kept=kept)
    sampled = np.concatenate([record["logprobs"] for record in found])
    whole, mass = (np.concatenate([rows[index] for rows in scored]) for index in (0, 1))
    naive, over_kept = np.abs(sampled - whole), np.abs(sampled - (whole - mass))
    assert over_kept.mean() < 0.02
    assert naive.mean() > 10 * over_kept.mean()
