"""Every shipped contract, with what each integration says of a sequence: no slice waits for a name nobody sends."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kc_otel.contract.load import load
from kc_otel.contract.measuring_paths import AUTOMATIC, MeasuringPath
from kc_otel.contract.slices import LAG, OF_TOKENS
from kc_otel.integrations.slime import slime_hooks
from kc_otel.integrations.trl.rollouts import own_attributes
from kc_otel.integrations.verl.logged_batch import LoggedBatch
from kc_otel.integrations.vllm.delivery import _automatic
from kc_otel.record.guided_loop import quarantine
from kc_otel.record.recorder import Recorder

SHIPPED = sorted((Path(__file__).parents[2] / "contracts").glob("*.yaml"))
YOURS = {"task", "language", "turns", "batch_size", "chunked_prefill"}
"""Attributes of shipped contracts that only the data can know: a column, a header, the test of an engine."""
PROMPT, COUNTED, WIDTH = 40_000, 5_000, 5_100
torch = pytest.importorskip("torch")


def masks():
    """Two sequences of which 5,000 of 5,100 sampled tokens count, after a prompt of 40,000."""
    completion = torch.zeros(2, WIDTH, dtype=torch.int64)
    completion[:, :COUNTED] = 1
    return torch.ones(2, PROMPT, dtype=torch.int64), completion


def of_trl(_):
    prompt, completion = masks()
    return own_attributes({"prompt_mask": prompt, "advantages": torch.zeros(2)}, completion, training=True)


def of_verl(_):
    prompt, completion = masks()
    side = torch.full((2, WIDTH), -1.0)
    batch = {
        "responses": completion, "response_mask": completion, "attention_mask": torch.cat([prompt, completion], 1),
        "old_log_probs": side, "rollout_log_probs": side,
    }  # fmt: skip
    sources = np.array(["math", "math"], dtype=object)
    return LoggedBatch.of(SimpleNamespace(batch=batch, non_tensor_batch={"data_source": sources})).attributes


def of_slime(monkeypatch):
    given = {}
    recorder = SimpleNamespace(compare=lambda *_, **kwargs: given.update(kwargs))
    monkeypatch.setattr(slime_hooks, "_recorder", lambda _: recorder)
    sides = [torch.full((WIDTH,), -1.0)] * 2
    slime_hooks.record_rollout(
        SimpleNamespace(), 1,
        {"log_probs": sides, "rollout_log_probs": sides, "loss_masks": list(masks()[1]),
         "tokens": [torch.zeros(PROMPT + WIDTH, dtype=torch.int64)] * 2},
    )  # fmt: skip
    return given["attributes"]


def of_vllm(_):
    completion = SimpleNamespace(
        prompt_ids=[0] * PROMPT, token_ids=[0] * COUNTED, model="m", lora="", finish_reason="stop", params=None
    )
    return [_automatic(completion)] * 2


def of_nobody(_):
    return None


INTEGRATIONS = {"trl": of_trl, "verl": of_verl, "slime": of_slime, "vllm": of_vllm, "loop": of_nobody}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_every_slice_of_lengths_is_filled(name, path, recorded_slices, monkeypatch):
    contract = load(path)
    attributes = INTEGRATIONS[name](monkeypatch)
    longest = {slice for slice, spec in contract.slices.items() if _asks_for_more(spec, attributes)}
    side = np.full((2, WIDTH), -1.0)
    mask = masks()[1].numpy()
    assert longest <= recorded_slices(contract, side, mask, attributes)


def _asks_for_more(spec, attributes):
    """Whether a slice is of long sequences, and of nothing that the data alone knows."""
    unknown = YOURS | ({"prompt_tokens"} if attributes is None else set())
    return not spec.conditions.keys() & unknown and all(
        condition.comparison in {">=", ">"} for conditions in spec.conditions.values() for condition in conditions
    )


@pytest.fixture
def recorded_slices(memory):
    """Slices that a recorder has exported a batch for."""

    def run(contract, side, mask, attributes):
        with Recorder(contract, metric_exporter=memory, sampling=1.0) as recorder:
            recorder.compare(side, side, mask=mask, attributes=attributes)
        return {point.attributes["kc.slice"] for point in memory.points("kc.drift.tv_token") if point.count}

    return run


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("way", MeasuringPath)
def test_a_shipped_contract_asks_only_the_data_for_attributes(way, path):
    """What an integration does not send by itself is a column of the data, never a second name of a length."""
    unsent = {name for spec in load(path).slices.values() for name in spec.conditions.keys() - AUTOMATIC[way]}
    lengths = {"prompt_tokens"} if way in {MeasuringPath.LOOP, MeasuringPath.GATE} else set()
    assert unsent <= YOURS | lengths


def test_the_integrations_send_what_coverage_says(monkeypatch):
    ways = {"trl": MeasuringPath.TRL, "verl": MeasuringPath.VERL, "vllm": MeasuringPath.VLLM}
    for name, way in ways.items():
        sent = (
            set(INTEGRATIONS[name](monkeypatch)[0]) | {"completion_tokens", LAG} | OF_TOKENS
        )  # which the recorder knows
        assert AUTOMATIC[way] - {"lora"} <= sent, name


def test_the_quarantine_knows_lengths_from_the_mask():
    contract = load(next(path for path in SHIPPED if path.stem == "rl-rollouts-bf16-fp8"))
    train, inference = np.full((2, WIDTH), -3.0), np.full((2, WIDTH), -0.1)
    mask = np.ones((2, WIDTH), dtype=bool)
    mask[1, 100:] = False
    found = quarantine(train, inference, contract, mask=mask, slices=["long-rollout"], clauses=["token-tv"])
    assert found.reasons == ("token-tv", "")
