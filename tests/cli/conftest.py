"""Commands of `kc-otel` in this process, and an evaluator that answers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kc_otel.serve.core import Core
from tests.tools.api import client_of
from tests.tools.commands import commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., tuple[int, str, str]]]:
    """Registers commands, in an environment that says nothing to them; see `tests.tools.commands`."""
    for name in ("KC_OTEL_URL", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    return commands


@pytest.fixture
def run(command: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[..., tuple[int, str, str]]:
    """Runs the commands that the file names in COMMANDS."""
    return command(*request.module.COMMANDS)


@pytest.fixture
def evaluator_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Core], None]:
    """Has a core answer what commands ask the evaluator's API."""

    def answer(core: Core) -> None:
        client = client_of(core)

        def request(method: str, url: str, *, timeout: Any = None, **arguments: Any) -> httpx.Response:  # noqa: ARG001
            return client.request(method, httpx.URL(url).path, **arguments)

        monkeypatch.setattr(httpx, "request", request)

    return answer


PLANTED = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: planted, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: torch}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
statistical:
  - {id: token-tv, metric: tv_token, limit: 0.01}
  - {id: tail, metric: abs_log_ratio, statistic: "fraction > 0.01", limit: 5%}
escalation: [{on: fail, do: [locate]}]
"""
_KERNELS = """\
from tests.diagnose.planted_faults import FAULTS, Model, pair

train, infer = pair(FAULTS[2], 2)
same = pair(None, 0)[1]
other = Model(seed=1)
shallow = Model()
del shallow.layers[3]
number = 3
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A contract's text; the current folder has it, two kernels that break it, and the sequences that show it."""
    pytest.importorskip("torch")
    from tests.diagnose.planted_faults import conversations

    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(PLANTED)
    (tmp_path / "kernels.py").write_text(_KERNELS)
    rows = [
        {
            "prompt_ids": sequence.token_ids[: sequence.prompt_tokens],
            "token_ids": sequence.token_ids[sequence.prompt_tokens :],
            "attributes": {"task": "code" if index < 8 else "prose"},
        }
        for index, sequence in enumerate(conversations())
    ]
    (tmp_path / "code.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return PLANTED


@pytest.fixture
def locate(planted: str, command: Callable[..., Any]) -> Callable[..., tuple[int, str, str]]:  # noqa: ARG001 - files
    """Runs `kc-otel locate run` on the planted fault."""
    run = command("locate")

    def invoke(*options: str, infer: str = "infer") -> tuple[int, str, str]:
        kernels = ("--train", "kernels.py:train", "--infer", f"kernels.py:{infer}", "--sequences", "code.jsonl")
        return run("locate", "run", "contract.yaml", *kernels, *options)

    return invoke
