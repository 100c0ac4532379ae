"""Drift beside the reward: what TensorBoard, MLflow, W&B and trackio themselves keep of our scalars by step."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kc_otel.offline.run_log.read_run_log import RunLogError, read_run_log
from kc_otel.offline.tracker import Tracker

pytest.importorskip("vllm", reason="the logs of trainers are installed beside the engines")
HOME = Path(sys.prefix) / "trackers"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """They lie apart from what the other tests find."""
    monkeypatch.syspath_prepend(HOME)


def test_tensorboard_shows_the_steps(tmp_path):
    """What its own reader finds is what was written, at its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (3, 7):
        with Tracker(f"tensorboard:{tmp_path}") as log:
            log.write(step, {"kc/token-tv/all": step / 100})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, round(event.value, 6)) for event in events.Scalars("kc/token-tv/all")]
    assert found == [(3, 0.03), (7, 0.07)]


def test_mlflow_shows_them_in_the_run_of_the_trainer(tmp_path, monkeypatch):
    """Beside what the trainer logged there."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    client = mlflow.MlflowClient()
    run_id = client.create_run(client.create_experiment("grpo")).info.run_id
    client.log_metric(run_id, "reward", 1.0, step=7)
    with Tracker(f"mlflow:{run_id}") as log:
        log.write(7, {"kc/token-tv/worst/code": 0.07})
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "kc/token-tv/worst/code")] == [(7, 0.07)]


def _complete(file, seconds=20.0):
    """A run's log once its end is in it: W&B's own process writes it, and a little later than the run has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(RunLogError):
            if len((found := read_run_log(file)).get("kc/step", ((), ()))[1]) == 2:
                return found
        time.sleep(0.05)
    return read_run_log(file)


def test_wandb_shows_them_in_the_run_of_the_trainer(tmp_path, monkeypatch):
    """What W&B keeps of an offline run has the scalars, and as their axis the steps they are of, also of the past."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    with Tracker("wandb:grpo/run1") as log:
        for step in (7, 3):
            log.write(step, {"kc/token-tv/all": step / 100})
    (file,) = tmp_path.glob("wandb/offline-run-*/run-run1.wandb")
    found = _complete(file)
    assert found["kc/step"][1].tolist() == [7.0, 3.0]
    assert found["kc/token-tv/all"][1].tolist() == [0.07, 0.03]


TRACKED = """
from kc_otel.offline.run_log.read_run_log import read_run_log
from kc_otel.offline.tracker import Tracker
with Tracker("trackio:grpo/run1") as log:
    for step in (3, 7):
        log.write(step, {"kc/token-tv/all": step / 100})
"""


def test_trackio_shows_them_in_the_run_of_the_trainer(tmp_path):
    """What trackio keeps on disk is what was written, at its step."""
    path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-c", TRACKED],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path), "PYTHONPATH": path},
        check=True,
    )
    with closing(sqlite3.connect(tmp_path / "grpo.db")) as kept:
        rows = kept.execute("SELECT step, metrics FROM metrics WHERE run_name = 'run1' ORDER BY step").fetchall()
    assert [(step, json.loads(metrics)) for step, metrics in rows] == [
        (3, {"kc/token-tv/all": 0.03}), (7, {"kc/token-tv/all": 0.07}),
    ]  # fmt: skip
