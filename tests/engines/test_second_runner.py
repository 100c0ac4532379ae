"""What vLLM's second model runner says: the tokens that truncation kept, and the experts that tokens are sent to."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from kc_otel.record.operator_drift import route_disagreement
from kc_otel.recordings.request import KeptTokens
from kc_otel.recordings.scoring import hf_scorer
from tests.engines._second_runner import CHOSEN, LAYERS, mixture

pytestmark = pytest.mark.slow


def said(what, folder):
    command = [sys.executable, "-m", "tests.engines._second_runner", what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_router_that_is_another_is_named_by_its_layer(tmp_path):
    """Routes agree in every layer but for rounding; where the trainer has another router in the last, it does not."""
    sequences = said("routes", tmp_path)
    model = mixture()
    sound = disagreement(model, sequences)
    assert (sound < 0.05).all()
    with torch.no_grad():
        model.model.layers[-1].mlp.gate.weight.normal_(std=0.02)
    planted = disagreement(model, sequences)
    assert planted[0] == sound[0]
    assert planted[1] > 0.3


def disagreement(model, sequences):
    found = []
    for tokens, routes in sequences:
        theirs = np.array(routes)
        assert theirs.shape == (len(tokens) - 1, LAYERS, CHOSEN)  # the last token was sampled, and sent nowhere
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        ours = np.stack([scores.topk(CHOSEN, -1).indices.numpy() for scores in logits], axis=1)
        found.append(route_disagreement(ours, theirs))
    return np.concatenate(found).mean(axis=0)


def test_what_vllm_kept_is_what_both_kernels_are_compared_over(tiny_model):
    """Over the tokens that top-p and top-k kept, the edge of the nucleus is no drift."""
    from transformers import AutoModelForCausalLM

    found = said("masks", tiny_model)
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
