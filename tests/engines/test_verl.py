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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
    {"data_source": np.array(["code"] * 64, dtype=object), "uid": np.array(["a"] * 64, dtype=object)},
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
    path.write_text(CONTRACT)
    evaluator = Evaluator([load(path)])

    def handle(body, _):
        evaluator.ingest_metrics(ExportMetricsServiceRequest.FromString(body), time.time())
        return 200

    def run(*command, **changed):
        with sink(handle) as address:
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith(("KC_OTEL_", "OTEL_"))},
                "KC_OTEL_CONTRACT": str(path), "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": address, "OTEL_TRACES_EXPORTER": "none",
                "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **changed,
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500,
                check=False,
            )  # fmt: skip
        found = {(one.cell.clause, one.cell.slice): one for one in verdicts_of(evaluator, time.time())}
        assert done.returncode == 0, done.stderr[-3000:]
        return found, done.stdout + done.stderr

    return run


def test_a_run_is_watched_by_an_environment_variable_alone(watched):
    """Drift by data source, the weights' lag and advantages; each of verl's 128 sequences once, in its own metrics."""
    found, output = watched(HERE / "_verl_run.py")
    assert "step:4" in output
    assert found["token-tv", "all"].samples == 128
    assert (str(found["token-tv", "code"].status), found["token-tv", "code"].samples) == ("PASS", 64)
    assert (str(found["token-tv", "tables"].status), found["token-tv", "tables"].samples) == ("FAIL", 64)
    assert found["token-tv", "code"].estimate < 0.02
    assert found["token-tv", "tables"].estimate > 0.08
    assert (str(found["weights", "all"].status), found["weights", "all"].estimate) == ("PASS", 0)
    assert 0 < found["favoured", "tables"].estimate < 0.5
    assert found["reward", "tables"].samples == 64
    assert found["reward", "code"].estimate < 0.1


def test_the_trainer_before_v1_is_watched_too(watched):
    """Its step by verl's own functions on a real DataProto; what a correction rejects later on counts."""
    found, _ = watched("-c", LEGACY)
    assert (str(found["token-tv", "code"].status), found["token-tv", "code"].samples) == ("PASS", 64)
    assert found["favoured", "code"].samples == 64


def test_verl_starts_whatever_is_wrong(watched):
    """A contract that is none is said, and training goes on."""
    found, output = watched("-c", LEGACY, KC_OTEL_CONTRACT="/nowhere/contract.yaml")
    assert {str(one.status) for one in found.values()} == {"NO_DATA"}
    assert "kc-otel: verl is not watched: " in output
    assert "/nowhere/contract.yaml" in output
