"""The example of continuous actions: intervals hold what quadrature says, with densities on both sides of 1."""

from __future__ import annotations

import pytest
import torch

from examples.continuous.__main__ import CONTRACT, Velocity, log_density, run
from kc_otel import Recorder
from kc_otel.contract.lint import lint
from kc_otel.contract.load import load
from tests.client.test_two_causes import Judge


def test_its_contract_is_sound():
    assert lint(load(CONTRACT)) == []


@pytest.mark.slow
def test_intervals_hold_the_distances_that_quadrature_finds():
    """By timestep: little where noise is large, more where it is small."""
    torch.manual_seed(0)
    judge = Judge(load(CONTRACT))
    with Recorder(CONTRACT, metric_exporter=judge, export_interval=1000.0) as recorder:
        truth = run(recorder, Velocity())
        assert recorder.force_flush()
        assert recorder.stats().invalid == {}
    found = {verdict.cell.slice: verdict for verdict in judge.evaluation("continuous").verdicts}
    for name, distance in truth.items():
        assert found[name].lower < distance < found[name].upper
        assert found[name].status.value == "PASS"
    assert truth["late"] > 5 * truth["early"]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("density", [None, True])
def test_densities_are_taken_where_it_is_said_that_they_are(density, as_tensor):
    made = load(CONTRACT)
    if density:
        made = made.model_copy(update={"assumptions": made.assumptions.model_copy(update={"density": False})})
    place, noise = torch.randn(40, 1), torch.tensor(0.01)
    train, inference = (log_density(0.01 * place, mean, noise) for mean in (torch.tensor(0.0), noise * 0.1))
    assert (inference > 0).any()
    sides = [train, inference] if as_tensor else [train.numpy(), inference.numpy()]
    with Recorder(made, metric_exporter=(judge := Judge(made)), export_interval=1000.0) as recorder:
        recorder.compare(*sides, density=density)
        recorder.compare(*sides, density=False)
        for wrong in (torch.nan, torch.inf, -torch.inf):
            inference[0] = wrong
            recorder.compare(train, inference, density=True)
        assert recorder.force_flush()
    assert judge.evaluator
    assert recorder.stats().invalid["nan_logprob"] == recorder.stats().invalid["impossible_token"] == 1
    assert recorder.stats().invalid["positive_logprob"] >= 2
    assert 40 + 3 * 39 <= recorder.stats().tokens < 80 + 3 * 39
