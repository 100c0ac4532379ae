"""OTEL_CONFIG_FILE with the real opentelemetry-configuration: what it configures is what drift is exported through."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: configured, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.2}]
observability: {min_samples: 100, heartbeat: 60s, sampling: 1.0}
"""
FILE = """\
file_format: "1.0"
resource:
  attributes:
    - {name: service.name, value: trainer}
    - {name: rl.run.id, value: "${RUN}"}
meter_provider:
  readers:
    - periodic: {interval: 7000, timeout: 3000, exporter: {console: {}}}
tracer_provider:
  processors:
    - simple: {exporter: {console: {}}}
"""
PROGRAM = """
import numpy as np
from opentelemetry import trace
from opentelemetry.configuration import configure_sdk, load_config_file
import os
configure_sdk(load_config_file(os.environ["OTEL_CONFIG_FILE"]))
from kc_otel import Recorder
from kc_otel.record.telemetry import environment
print("interval", environment.export_interval(1.0), environment.export_timeout())
recorder = Recorder("contract.yaml", resource={"rl.system": "mine", "rl.run.id": "other"})
recorder.compare(np.full((4, 8), -1.0), np.full((4, 8), -1.1))
recorder.shutdown()
trace.get_tracer_provider().shutdown()
"""


def ran(folder, text, program=PROGRAM, **environment):
    (folder / "contract.yaml").write_text(CONTRACT)
    (folder / "otel.yaml").write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "KC_OTEL_"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=kept | {"OTEL_CONFIG_FILE": "otel.yaml", "RUN": "r1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def objects(text):
    """JSON objects in what a console exporter printed."""
    decoder, at, found = json.JSONDecoder(), 0, []
    while (at := text.find("{", at)) >= 0:
        value, at = decoder.raw_decode(text, at)
        found.append(value)
    return found


def test_drift_goes_where_the_file_says(tmp_path):
    """Metrics and spans come out of its console exporters, on its resource, though the variables name another place."""
    done = ran(
        tmp_path, FILE, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_RESOURCE_ATTRIBUTES="a=b",
        OTEL_METRIC_EXPORT_INTERVAL="1000",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "interval 7.0 3.0" in done.stdout
    printed = objects(done.stdout)
    metrics = [each["resource_metrics"][0] for each in printed if "resource_metrics" in each]
    names = {metric["name"] for each in metrics for scope in each["scope_metrics"] for metric in scope["metrics"]}
    assert any("tv" in name or "ratio" in name for name in names), names
    attributes = metrics[-1]["resource"]["attributes"]
    assert attributes["service.name"] == "trainer"
    assert attributes["rl.run.id"] == "r1"
    assert attributes["rl.system"] == "mine"
    assert "a" not in attributes
    assert attributes["service.instance.id"]
    spans = [each for each in printed if each.get("name") == "kc.compare"]
    assert spans
    assert spans[0]["resource"]["attributes"]["service.name"] == "trainer"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("disabled: true\n" + FILE, ""),
        (FILE.split("meter_provider", maxsplit=1)[0], ""),
        (FILE.replace("console", "kafka", 1), "kafka"),
        ("file_format: [", "otel.yaml"),
    ],
)
def test_a_file_without_metrics_or_that_is_wrong_stops_no_program(tmp_path, text, said):
    """Nothing is exported, the reason is logged with the file's or the exporter's name, and the program goes on."""
    program = PROGRAM.replace("configure_sdk(load_config_file", "(lambda _: 0)(str").replace(
        "trace.get", "0 and trace.get"
    )
    done = ran(tmp_path, text, "import logging; logging.basicConfig()\n" + program)
    assert done.returncode == 0, done.stderr
    assert "resource_metrics" not in done.stdout
    assert said in done.stderr


def test_without_the_package_the_log_says_what_to_install(tmp_path):
    """Drift is not exported, and the remedy is one line."""
    program = "import sys, logging; logging.basicConfig(); sys.modules['opentelemetry.configuration'] = None\n"
    body = "\n".join(line for line in PROGRAM.splitlines() if "configur" not in line and "trace" not in line)
    done = ran(tmp_path, FILE, program + body)
    assert done.returncode == 0, done.stderr
    assert "pip install opentelemetry-configuration" in done.stderr
