"""`kc-otel replay`: exit codes, what it prints, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from typer.testing import CliRunner

from kc_otel.cli import _register, app
from kc_otel.judge.otlp.traffic_entries import marked_frame

START = 1_800_000_000.0
CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: {name}, version: {version}, owner: tests}}
kernels:
  train: {{engine: torch, dtype: float32}}
  inference: {{engine: vllm, dtype: bfloat16}}
statistical:
  - {{id: token-tv, metric: tv_token, unit: token, limit: {limit}}}
observability: {{window: 1m, long_window: 5m, min_samples: 500, heartbeat: 30s}}
escalation:
  - {{on: fail, for: {after}, severity: critical, do: [{{route: train-kernel}}, {{webhook: pager}}]}}
"""


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    _register()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Five minutes of a recorder that drifts from the second minute on."""
    path, bucket = (
        tmp_path / "recording",
        {True: math.ceil(16 * math.log2(0.1)), False: math.ceil(16 * math.log2(1e-3))},
    )
    counts = {True: 0, False: 0}
    with path.open("wb") as file:
        for index in range(1, 31):
            counts[index > 12] += 1000
            request = ExportMetricsServiceRequest()
            metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.drift.tv_token")
            metric.exponential_histogram.aggregation_temporality = 2
            point = metric.exponential_histogram.data_points.add(
                start_time_unix_nano=round(START * 1e9), time_unix_nano=round((START + 10 * index) * 1e9), scale=4
            )
            names = {"contract": "policy", "slice": "all", "kernel.train": "aaaa", "kernel.inference": "bbbb"}
            for name, value in names.items():
                point.attributes.add(key=f"kc.{name}").value.string_value = value
            first = bucket[False] - 1
            point.positive.offset = first
            point.positive.bucket_counts.extend([0] * (bucket[True] - first))
            point.positive.bucket_counts[0], point.positive.bucket_counts[-1] = counts[False], counts[True]
            point.count = sum(counts.values())
            point.sum = counts[False] * 0.00098 + counts[True] * 0.098
            file.write(marked_frame(request.SerializeToString(), START + 10 * index))
    return path


@pytest.fixture
def contract(tmp_path: Path) -> Any:
    """Writes contracts."""

    def write(file: str, **changes: Any) -> Path:
        path = tmp_path / file
        path.write_text(CONTRACT.format(**{"name": "policy", "version": 1, "limit": 0.02, "after": "20s"} | changes))
        return path

    return write


def run(*arguments: object):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_one_contract_says_what_it_does(recording: Path, contract: Any) -> None:
    """Alerts with slice, kernels, from and to; what is in force; webhooks. There is nothing to differ from."""
    done = run(recording, "--contract", contract("policy.yaml"))
    assert done.exit_code == 0, done.output
    assert "30 requests, points: 30 accepted" in done.output
    assert "policy v1 (" in done.output
    assert "1 alert, 1 route or directive, 1 webhook" in done.output
    assert "still at the end  critical fail: token-tv on all (aaaa / bbbb) -> route:train-kernel" in done.output
    assert "> limit 0.02 with " in done.output
    assert "still at the end  route:train-kernel on all away from bbbb" in done.output
    assert "webhook pager: 1 firing" in done.output


@pytest.mark.slow
def test_the_same_contract_exits_with_0_and_another_with_1(recording: Path, contract: Any) -> None:
    """As `diff` does; what moved is said with both times."""
    old, new = contract("old.yaml"), contract("new.yaml", after="1m", version=2)
    same = run(recording, "--contract", old, "--against", old)
    assert (same.exit_code, same.output.splitlines()[-1]) == (0, "no difference")
    done = run(recording, "--contract", new, "--against", old)
    assert done.exit_code == 1, done.output
    assert "~ critical fail: token-tv on all (aaaa / bbbb): fires 40s later (2027-01-15 08:0" in done.output
    assert "~ route:train-kernel on all away from bbbb: begins 40s later" in done.output
    gone = run(recording, "--contract", contract("new.yaml", limit=0.5), "--against", old)
    assert "only with the old contract:\n- 2027-01-15" in gone.output
    assert "webhook pager: 0 firing instead of 1" in gone.output
    back = run(recording, "--contract", old, "--against", contract("new.yaml", limit=0.5))
    assert "only with the new contract:\n+ 2027-01-15" in back.output


@pytest.mark.slow
def test_a_program_gets_json(recording: Path, contract: Any) -> None:
    """Both timelines, and the differences with seconds."""
    old, new = contract("old.yaml"), contract("new.yaml", after="1m", version=2)
    found = json.loads(run(recording, "--contract", new, "--against", old, "--json").output)
    (moved,) = found["changed"]["alerts_moved"]
    assert (moved["later"], moved["ends_later"]) == (40.0, 0.0)
    assert moved["new"]["start"] == found["new"]["alerts"][0]["start"] == found["old"]["alerts"][0]["start"] + 40
    assert found["new"]["version"] == 2
    assert found["changed"]["messages"] == []
    alone = json.loads(run(recording, "--contract", new, "--json").output)
    assert (alone["old"], alone["changed"], alone["new"]) == (None, None, found["new"])


@pytest.mark.slow
def test_the_interval_of_evaluations_can_be_said(recording: Path, contract: Any) -> None:
    """Where it is not a duration it is refused."""
    done = run(recording, "--contract", contract("policy.yaml"), "--tick", "5s", "--json")
    assert json.loads(done.output)["new"]["evaluations"] == 59
    refused = run(recording, "--contract", contract("policy.yaml"), "--tick", "often")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("--tick: ")
    refused = run(recording, "--contract", contract("policy.yaml"), "--tick", "0s")
    assert refused.exit_code == 2
    assert "--tick 0s: give more than 0 s" in refused.stderr


def test_damage_is_named_beside_the_answer(recording: Path, contract: Any) -> None:
    """On the other stream, so that JSON stays JSON; a long list is cut short."""
    content = recording.read_bytes()
    recording.write_bytes(b"\0\0\0\x05spoil" * 7 + content[:-3])
    done = run(recording, "--contract", contract("policy.yaml"), "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["new"]["requests"] == 29
    said = done.stderr.splitlines()
    assert said[0].startswith(f"{recording}: message 1: the body is not an ExportMetricsServiceRequest in protobuf")
    assert len(said) == 6
    assert said[-1] == "and 3 more messages that could not be read"


@pytest.mark.slow
def test_bad_input_exits_with_2_and_says_what_to_do(recording: Path, contract: Any, tmp_path: Path) -> None:
    """No recording, no contract, another contract's name."""
    good = contract("policy.yaml")
    for arguments, said in (
        ((tmp_path / "nowhere", "--contract", good), "cannot be read (No such file"),
        (
            (tmp_path / "nowhere", "--contract", good, "--against", good, "--tick", "10s"),
            "cannot be read (No such file",
        ),
        ((good, "--contract", good), "is no recording; give what"),
        ((recording, "--contract", tmp_path / "nowhere.yaml"), "nowhere.yaml"),
        ((recording, "--contract", contract("moe.yaml", name="moe")), "is a recording of policy, not of moe"),
        ((recording, "--contract", contract("moe.yaml", name="moe"), "--against", good), "are two contracts"),
    ):
        done = run(*arguments)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert said in done.stderr
