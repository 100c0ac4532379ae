"""Where a real vLLM sends tokens in a mixture of experts, against the routers of Hugging Face's model."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from kc_otel.record.operator_drift import route_disagreement
from tests.engines._routes_run import CHOSEN, LAYERS, mixture

pytestmark = pytest.mark.slow


def test_a_router_that_is_another_is_named_by_its_layer(tmp_path):
    """Routes agree in every layer but for rounding; where the trainer has another router in the last, it does not."""
    command = [sys.executable, "-m", "tests.engines._routes_run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    sequences = json.loads(done.stdout.splitlines()[-1])
    model = mixture()
    sound = disagreement(model, sequences)
    assert (sound < 0.05).all()
    with torch.no_grad():
        model.model.layers[-1].mlp.gate.weight.normal_(std=0.02)
    planted = disagreement(model, sequences)
    assert planted[0] == sound[0]
    assert planted[1] > 0.3


def disagreement(model, sequences):
    """Mean of `route_disagreement` by layer."""
    found = []
    for tokens, routes in sequences:
        theirs = np.array(routes)
        assert theirs.shape == (len(tokens) - 1, LAYERS, CHOSEN)  # the last token was sampled, and sent nowhere
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        ours = np.stack([scores.topk(CHOSEN, -1).indices.numpy() for scores in logits], axis=1)
        found.append(route_disagreement(ours, theirs))
    return np.concatenate(found).mean(axis=0)
