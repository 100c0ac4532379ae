"""verl 0.9 and the plugin that it finds by itself: its own trainer on a CPU, watched by an environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.load import load
from kc_otel.judge.evaluator import Evaluator
from tests.tools.servers import sink
from tests.tools.verdicts import verdicts_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: fsdp}, inference: {engine: vllm}}
assumptions: {reward_range: [0, 1]}
slices: {code: {where: {data_source: code}}, tables: {where: {data_source: tables}}}
statistical:
- {id: token-tv, metric: tv_token, cap: 0.25, limit: 0.05}
- {id: reward, metric: reward_drift, limit: 0.5}
- {id: favoured, metric: advantage_drift_positive, limit: 0.5}
runtime: [{id: weights, metric: weights_lag, statistic: max, limit: 0}]
observability: {min_samples: 100, min_sequences: 20}
"""
FAST = "actor_rollout_ref.actor.optim.lr=0.03"
"""Weights that are a step old differ by more than 32 sequences vary."""
BY_SEQUENCE = CONTRACT.replace("metric: tv_token,", "metric: tv_token, unit: sequence,")
LEGACY = """
import numpy as np, torch, verl
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils.debug.metrics import calculate_debug_metrics

said = -torch.rand(64, 20) - 0.1
mask = torch.ones(64, 20, dtype=torch.int64)
data = DataProto.from_dict(
    {"prompts": torch.zeros(64, 5), "responses": torch.zeros(64, 20, dtype=torch.int64),
     "response_mask": mask, "attention_mask": torch.ones(64, 25),
     "rollout_log_probs": said, "old_log_probs": said + 0.001 * torch.randn(64, 20)},
    {"data_source": np.array(["code"] * 64, dtype=object), "uid": np.arange(64).astype(str).astype(object)},
)
print(calculate_debug_metrics(data)["training/rollout_probs_diff_max"])
data.batch["token_level_scores"] = data.batch["token_level_rewards"] = torch.rand(64, 20)
data.batch["advantages"] = data.batch["returns"] = torch.ones(64, 20)
data.batch["response_mask"] = mask * (torch.arange(64) < 60)[:, None]  # a correction rejects; all were sampled
compute_data_metrics(data, use_critic=False)
"""


@pytest.fixture
def watched(tmp_path):
    """Runs Python with nothing but a contract and an endpoint in its environment; returns what an evaluator says."""
    path = tmp_path / "contract.yaml"

    def run(*command, contract=CONTRACT, **changed):
        path.write_text(contract)
        evaluator = Evaluator([load(path)])
        run.evaluation = lambda: evaluator.evaluate(time.time())["policy"]

        def handle(body, _):
            evaluator.ingest_metrics(ExportMetricsServiceRequest.FromString(body), time.time())
            return 200

        with sink(handle) as address:
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith(("KC_OTEL_", "OTEL_"))},
                "KC_OTEL_CONTRACT": str(path), "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": address, "OTEL_TRACES_EXPORTER": "none",
                "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **changed,
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1500,
                check=False,
            )  # fmt: skip
        found = {(verdict.cell.clause, verdict.cell.slice): verdict for verdict in verdicts_of(evaluator, time.time())}
        assert done.returncode == 0, done.stderr[-3000:]
        return found, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("bypass", "contract", "prompts"),
    [(False, CONTRACT, 64), pytest.param(True, BY_SEQUENCE, 16, marks=pytest.mark.long)],
)
def test_a_run_is_watched_by_an_environment_variable_alone(watched, bypass, contract, prompts):
    """Verl's synchronous trainer, worker and FSDP engine: drift planted on one source, the weights' lag and advantages.

    Each of 128 sequences counts once, also in bypass mode, where the workers' loss is the first to see both sides.
    """
    mode = f"algorithm.rollout_correction.bypass_mode={bypass}"
    found, output = watched(HERE / "_verl_run.py", "sync", "drift=0.5", mode, contract=contract)
    assert "step:4" in output
    assert ("the first mini-batch of each update is measured, here 32 of 32 sequences" in output) is bypass
    assert found["token-tv", "all"].samples == 128
    assert (str(found["token-tv", "code"].status), found["token-tv", "code"].samples) == ("PASS", 64)
    assert (str(found["token-tv", "tables"].status), found["token-tv", "tables"].samples) == ("FAIL", 64)
    assert found["token-tv", "code"].estimate < 0.02
    assert found["token-tv", "tables"].estimate > 0.08
    assert (str(found["weights", "all"].status), found["weights", "all"].estimate) == ("PASS", 0)
    assert found["favoured", "tables"].samples
    assert abs(found["favoured", "tables"].estimate) < 0.5
    assert found["reward", "tables"].samples == prompts
    assert found["reward", "code"].estimate < 0.1
    assert not watched.evaluation().causes


@pytest.mark.parametrize("script", [("_verl_run.py", "colocate_async"), ("_verl_fully_async_run.py",)])
def test_drift_and_staleness_of_a_trainer_that_samples_ahead_are_two_numbers(watched, script):
    """All but the first batch are a step old; and one source drifts."""
    contract = BY_SEQUENCE.replace("limit: 0.05", "limit: 0.005")
    found, output = watched(HERE / script[0], *script[1:], "drift=0.4", FAST, contract=contract)
    assert "step:4" in output
    assert "the first mini-batch of each update is measured, here 32 of 32 sequences" in output
    assert (str(found["weights", "all"].status), found["weights", "all"].estimate) == ("FAIL", 1)
    assert found["token-tv", "all"].samples == 32
    assert found["token-tv", "code"].estimate < 0.01
    assert str(found["token-tv", "tables"].status) == "FAIL"
    assert found["token-tv", "tables"].estimate > 0.1
    (causes,) = {of for cell, of in watched.evaluation().causes.items() if cell.clause == "token-tv"}
    assert 0.7 < causes.share <= 0.75  # weights that differ by so much may look like other tokens
    assert causes.kernel.estimate == found["token-tv", "all"].estimate
    assert causes.kernel.lower > causes.limit
    assert causes.staleness.estimate > 0


@pytest.mark.parametrize(
    ("script", "steps", "share", "overrides"),
    [
        pytest.param(
            ("_verl_fully_async_run.py",), 2, 0.75, ["async_training.trigger_parameter_sync_step=2"],
            marks=pytest.mark.long,
        ),
        (
            ("_verl_run.py", "separate_async"), 4, None,
            ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.v1.separate_async.parameter_sync_step=2"],
        ),
    ],
)  # fmt: skip
def test_staleness_is_no_drift_of_the_kernels(watched, script, steps, share, overrides):
    """Of the fully asynchronous trainer, and of the one that trains and samples separately."""
    found, output = watched(HERE / script[0], *script[1:], *overrides, contract=BY_SEQUENCE)
    assert f"step:{steps}" in output
    assert (str(found["weights", "all"].status), found["weights", "all"].estimate) == ("FAIL", 2)
    assert found["token-tv", "all"].estimate < 0.01
    (causes,) = {of for cell, of in watched.evaluation().causes.items() if cell.clause == "token-tv"}
    assert causes.kernel.estimate < 0.01
    assert causes.staleness.estimate > 0.02
    assert causes.share == (share or 1 - found["token-tv", "all"].samples / 128)
    if share is None:
        assert "the first mini-batch of each update is measured, here 16 of 16 sequences" in output
        assert found["token-tv", "all"].upper < 0.1
        assert causes.staleness.estimate > 0.04
        assert causes.total.lower > causes.limit


def test_an_audit_scores_whole_prompts_before_the_step(watched):
    """Half of them, chosen by their names; the workers leave those out, so that each of 128 sequences counts once."""
    contract = BY_SEQUENCE.replace("slices: {", "slices: {audited: {where: {audit: true}}, ")
    found, output = watched(
        HERE / "_verl_run.py", "sync", "drift=0.5", contract=contract,
        KC_OTEL_AUDIT_SHARE="0.5", KC_OTEL_AUDIT_BUDGET="1e6",
    )  # fmt: skip
    assert "step:4" in output
    assert "kc-otel: audit forwards: " in output
    assert "kc/audit/skipped_steps:0" in output
    assert found["token-tv", "all"].samples == 128
    assert 16 <= found["token-tv", "audited"].samples <= 112
    assert found["token-tv", "audited"].samples % 4 == 0
    assert (str(found["token-tv", "code"].status), found["token-tv", "code"].samples) == ("PASS", 64)
    assert (str(found["token-tv", "tables"].status), found["token-tv", "tables"].samples) == ("FAIL", 64)
    assert (str(found["weights", "all"].status), found["weights", "all"].estimate) == ("PASS", 0)


@pytest.mark.long
def test_where_an_audit_is_skipped_the_workers_leave_nothing_out(watched):
    contract = BY_SEQUENCE.replace("slices: {", "slices: {audited: {where: {audit: true}}, ")
    found, output = watched(
        HERE / "_verl_run.py", "sync", contract=contract, KC_OTEL_AUDIT_SHARE="0.5", KC_OTEL_AUDIT_BUDGET="0",
    )  # fmt: skip
    assert "kc/audit/skipped_steps:3" in output
    assert 4 <= found["token-tv", "audited"].samples <= 28
    assert found["token-tv", "all"].samples == 128


def test_the_trainer_before_v1_is_watched_too(watched):
    found, _ = watched("-c", LEGACY)
    assert (str(found["token-tv", "code"].status), found["token-tv", "code"].samples) == ("PASS", 64)
    assert found["favoured", "code"].samples == 64


def test_verl_starts_whatever_is_wrong(watched):
    found, output = watched("-c", LEGACY, KC_OTEL_CONTRACT="/nowhere/contract.yaml")
    assert {str(verdict.status) for verdict in found.values()} == {"NO_DATA"}
    assert "kc-otel: verl is not watched: " in output
    assert "/nowhere/contract.yaml" in output
