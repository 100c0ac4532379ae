"""Commands of `kc-otel` in this process, and an evaluator that answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from kc_otel.serve.core import Core
from tests.tools.api import client_of


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., tuple[int, str, str]]]:
    """Registers commands; what it returns runs them: exit code, standard output and standard error."""
    for name in ("KC_OTEL_URL", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)

    def registered(*names: str) -> Callable[..., tuple[int, str, str]]:
        app = typer.Typer()
        register(app, *names)

        def run(*arguments: object, stdin: str | None = None, width: int = 80) -> tuple[int, str, str]:
            words = [str(argument) for argument in arguments]
            result = CliRunner().invoke(app, words, input=stdin, env={"COLUMNS": str(width), "LOGNAME": "ada"})
            assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
            return result.exit_code, result.stdout, result.stderr

        return run

    return registered


@pytest.fixture
def evaluator_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Core], None]:
    """Has a core answer what commands ask the evaluator's API."""

    def answer(core: Core) -> None:
        client = client_of(core)

        def request(method: str, url: str, *, timeout: Any = None, **arguments: Any) -> httpx.Response:  # noqa: ARG001
            return client.request(method, httpx.URL(url).path, **arguments)

        monkeypatch.setattr(httpx, "request", request)

    return answer
