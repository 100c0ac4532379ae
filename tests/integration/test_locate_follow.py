"""A policy asks for `locate`, a machine that follows answers, and the incident has it: three processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

from tests.integration.conftest import CONTRACT, Traffic

pytest.importorskip("torch")

KERNELS = """\
from tests.diagnose.planted_faults import FAULTS, pair
train, infer = pair(FAULTS[2], 2)
"""
WAIT_SECONDS = 120.0


@pytest.mark.slow
def test_what_the_policy_asks_for_is_looked_at_and_stands_on_the_incident(serve, contract_file, tmp_path):
    """Somebody is heard to listen, the culprit is named with evidence, and a restart of the evaluator keeps both."""
    from tests.diagnose.planted_faults import conversations

    text = CONTRACT.replace("window: 6s, long_window: 12s", "window: 60s, long_window: 120s")
    contract_file.write_text(text.replace("heartbeat: 3s", "heartbeat: 60s").replace("sample-more]", "locate]"))
    (tmp_path / "kernels.py").write_text(KERNELS)
    rows = [{"token_ids": sequence.token_ids, "attributes": {"task": "code"}} for sequence in conversations()]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    evaluator = serve()
    kernels = ("--train", "kernels.py:train", "--infer", "kernels.py:infer", "--sequences", "rows.jsonl")
    command = ("locate", "run", str(contract_file), *kernels, "--follow", "--by", "rack-7", "--url", evaluator.api)
    traffic = Traffic(contract_file, OTLPMetricExporter(endpoint=f"{evaluator.http}/v1/metrics"))
    words, env = (
        [sys.executable, "-m", "kc_otel", *command],
        os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    follower = subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    try:
        evaluator.wait("/api/v1/health", lambda health: health["listeners"]["policy"]["locate"], WAIT_SECONDS)
        for _ in range(4):
            traffic.send(code=0.3)
        found = evaluator.wait(
            "/api/v1/incidents", lambda answer: any(entry["diagnoses"] for entry in answer["incidents"]), WAIT_SECONDS
        )
        assert follower.poll() is None
    finally:
        traffic.recorder.shutdown()
        follower.terminate()
        follower.wait(30)
    (incident,) = [candidate for candidate in found["incidents"] if candidate["on"] == "fail"]
    (said,) = incident["diagnoses"]
    assert said["text"].startswith("first divergence: layer 2, o_proj")
    assert (said["by"], said["slice"]) == ("rack-7", "code")
    evidence = f"/api/v1/incidents/{incident['id']}/diagnoses/{said['evidence']}"
    assert evaluator.get(evidence)["culprit"]["tensors"] == ["layers.2.o_proj.weight"]
    assert "locate" in {action["kind"] for action in incident["actions"]}
    evaluator.kill()
    again = serve()
    assert [entry["text"] for entry in again.get(f"/api/v1/incidents/{incident['id']}")["diagnoses"]] == [said["text"]]
    assert again.get(evidence)["sequences"] == 10
