"""slime's hooks: what they take from a rollout and a micro-batch, and that they never raise into training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kc_otel.integrations.slime import slime_hooks
from kc_otel.integrations.slime.slime_hooks import record_mismatch, record_rollout
from tests.integrations.test_verl_watch import Recorded
from tests.tools.contracts import contract_text

CONTRACT = contract_text(statistical=[{"id": "token-tv", "metric": "tv_token", "limit": 0.05}])
ARGS = SimpleNamespace(rollout_temperature=0.8, bf16=True, sglang_kv_cache_dtype="fp8_e4m3")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    monkeypatch.setenv("KC_OTEL_CONTRACT", str(tmp_path / "contract.yaml"))
    monkeypatch.setattr(slime_hooks, "Recorder", Recorded)
    monkeypatch.setattr(slime_hooks, "_RECORDERS", {})
    slime_hooks._FAULTS._begin()
    return lambda: next(iter(slime_hooks._RECORDERS.values()))


def rollout(**changes):
    """What `rollout_data_postprocess` is given on a rank with two of four samples."""
    tokens = [torch.arange(7), torch.arange(9)]
    said = [torch.full((4,), -0.5), torch.full((5,), -0.25)]
    return {
        "tokens": tokens,
        "log_probs": [logprobs.clone().requires_grad_() for logprobs in said],
        "rollout_log_probs": said,
        "loss_masks": [torch.ones(4), torch.ones(5)],
        "advantages": [torch.zeros(4), torch.ones(5)],
        "raw_reward": [0.0, 1.0, 0.5, 0.25],
        "local_raw_reward": [1.0, 0.25],
        "source_names": ["math", "code"],
        **changes,
    }


def test_a_rollout_is_recorded_with_what_slices_are_made_of(recorded):
    record_rollout(ARGS, 12, rollout())
    ((train, _, given),) = recorded().calls
    assert not train[0].requires_grad
    assert (given["weights"], given["rewards"]) == ((12, None), [1.0, 0.25])
    assert [ids.tolist() for ids in given["token_ids"]] == [[3, 4, 5, 6], [4, 5, 6, 7, 8]]
    assert given["attributes"][1] == {"prompt_tokens": 4, "source": "code"}
    assert given["processing"][0] == {"temperature": 0.8}
    assert recorded().kernels["inference"].kv_cache_dtype == "fp8_e4m3"


def test_a_rollout_that_nobody_scored_says_what_to_switch_on(recorded):
    """The trainer leaves log-probabilities to the training forward where it can."""
    record_rollout(ARGS, 1, rollout(log_probs=None))
    assert recorded().dropped == [
        ("no-logprobs", "slime's rollout has no log_probs of the trainer; give it --get-mismatch-metrics")
    ]


def test_a_micro_batch_is_recorded_and_its_loss_stays(recorded):
    data = rollout()
    loss = torch.tensor(1.5)
    given = {"train_log_probs": data["log_probs"], "rollout_log_probs": data["rollout_log_probs"]}
    more = {"total_lengths": [7, 9], "response_lengths": [4, 5]}
    found = record_mismatch(ARGS, pg_loss=loss, loss_masks=data["loss_masks"], **given, **more)
    assert found == (loss, data["loss_masks"], {})
    assert len(recorded().calls) == 1


@pytest.mark.usefixtures("recorded")
def test_nothing_is_raised_into_training(monkeypatch, caplog, tmp_path):
    for _ in range(2):
        record_rollout(ARGS, 1, rollout(tokens=None))
    (tmp_path / "contract.yaml").write_text("kind: Nothing\n")
    slime_hooks._RECORDERS.clear()
    for _ in range(2):
        assert record_mismatch(ARGS, pg_loss=1, train_log_probs=[], rollout_log_probs=[], loss_masks=[])[0] == 1
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "contract.yaml" in said[1]
    monkeypatch.delenv("KC_OTEL_CONTRACT")
    record_rollout(ARGS, 1, {})
    assert len(caplog.records) == 2
