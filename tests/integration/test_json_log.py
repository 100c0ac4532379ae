"""`--log-format json`: a program reads every line that the evaluator writes, from its start to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_line_is_an_object(contract_file: Path, tmp_path: Path) -> None:
    """The start, what is announced, and the end: each line says its time, level and message."""
    ports = [word for name in ("grpc", "http", "api") for word in (f"--{name}-port", "0")]
    words = [
        "serve",
        str(contract_file),
        "--state",
        str(tmp_path / "s"),
        "--no-webhooks",
        "--log-format",
        "json",
        *ports,
    ]
    with subprocess.Popen([sys.executable, "-m", "kc_otel", *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "OTLP/gRPC" in line:
                process.terminate()
    said = [json.loads(line) for line in lines]
    assert len(said) > 1
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in said)
    assert process.returncode == 0
