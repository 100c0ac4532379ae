"""The README's code is run, its contract checked, its commands looked up: what a stranger copies has to work."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from starlette.testclient import TestClient

from kc_otel.cli import app
from kc_otel.client.webhooks import new_secret
from kc_otel.contract import load_text
from kc_otel.contract.lint import lint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block(language: str, mark: str) -> str:
    (found,) = (text for text in blocks(language) if mark in text)
    return found


def test_the_contract_has_no_errors_and_no_warnings() -> None:
    """It is the first thing that people copy."""
    assert lint(load_text(block("yaml", "kernel-contract/v1"), "README.md")) == []


def test_the_recorder_lines_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, from the repository's root, on a batch of rollouts."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    logprobs = np.log(np.random.default_rng(0).uniform(0.1, 1.0, (4, 32)))
    batch = SimpleNamespace(
        train_logprobs=logprobs,
        rollout_logprobs=logprobs,
        mask=np.ones((4, 32), bool),
        task=["tool-use"] * 4,
        prompt_tokens=[100] * 4,
    )
    names: dict[str, object] = {"rollouts": [batch] * 200}
    exec(compile(block("python", "kc_otel.Recorder"), "README.md", "exec"), names)
    recorder = names["recorder"]
    recorder.shutdown()
    stats = recorder.stats()
    assert not stats.dropped
    assert stats.batches > 0
    assert stats.batches + stats.unsampled == 200


def test_the_receiver_takes_what_is_signed_and_nothing_else() -> None:
    """The ten lines verify."""
    names: dict[str, object] = {"SECRET": new_secret()}
    exec(compile(block("python", "from kc_otel.client.webhooks"), "README.md", "exec"), names)
    client = TestClient(names["app"])
    assert client.post("/pager", content=b"{}").status_code == 401


def test_every_command_exists() -> None:
    """`kc-otel WORD` in the text is a command; `make WORD` is a target."""
    import kc_otel.cli

    if not app.registered_commands:
        kc_otel.cli._register()
    known = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"\bkc-otel ([a-z]+)\b(?= [A-Z`]|`| contracts| OLD)", README)) <= known
    assert {"serve", "check", "diff", "watch", "schema"} <= known
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b(?=`| +#| ARGS)", README)) <= targets
