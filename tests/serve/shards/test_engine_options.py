"""What `--engine ray` needs is asked for in a sentence; without it there are no shards, and who asks is told."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register, status_command
from kc_otel.judge.otlp.requests import Limits
from kc_otel.serve import server
from kc_otel.serve.config import ServeConfig, StreamEngine
from kc_otel.serve.core import Core
from kc_otel.serve.server import ServiceError, sink_of
from kc_otel.serve.shards import ShardError, ShardSeen
from tests.tools.api import client_of

RAY = ServeConfig(engine=StreamEngine.RAY, state=Path("state"), shard_folder=Path("shards"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(RAY, state=None), "give --state FILE"),
        (replace(RAY, shard_folder=None), "--shard-folder DIR"),
        (replace(RAY, record=True), "shards take each for itself"),
    ],
)
def test_what_it_needs_is_asked_for(config: ServeConfig, said: str) -> None:
    with pytest.raises(ServiceError, match=said):
        server.run([], config)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServiceError, match=r"needs ray: pip install 'kc-otel\[ray\]'"):
        server.run([], RAY)


def test_shards_are_shown_in_a_terminal(make_core: Any, drift: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that does not answer is named, and not all is known then; without shards none is listed."""
    core = make_core()
    core.evaluator.ingest_metrics(drift(0.001), time.time())
    core.tick(time.time())
    client = client_of(core)
    assert client.get("/api/v1/health").json()["shards"] == []
    core.shards = (
        ShardSeen("f00d", "node-7", 42, streams=1234, lag=2048, answered=5.0, waiting=1),
        ShardSeen(number=1, trouble="has not answered for 9 s"),
    )
    monkeypatch.setattr(status_command, "get", lambda _url, path, **query: client.get(path, params=query).json())
    monkeypatch.setattr(status_command, "troubles", lambda *_: [])
    app = typer.Typer()
    register(app, "status")
    found = CliRunner().invoke(app, [], env={"COLUMNS": "120"})
    assert found.exit_code == 3
    assert "2 shards, 1,234 streams" in found.output
    assert "shard 1 has not answered for 9 s" in found.output
    core.shards = core.shards[:1]
    assert CliRunner().invoke(app, []).exit_code == 0


def test_a_state_file_stays_with_the_engine_that_began_it(make_core: Any, drift: Any, tmp_path: Path) -> None:
    """Whose streams the other has not, so that every sum would count again."""

    async def begun(core: Core, config: ServeConfig) -> None:
        async with sink_of(core, config, Limits()) as (sink, _):
            await sink.metrics(drift(0.3))

    process = ServeConfig(state=tmp_path / "state")
    ray = replace(process, engine=StreamEngine.RAY, shard_folder=tmp_path / "shards")
    core = make_core()
    core.merged["shards"] = 2
    with pytest.raises(ShardError, match=r"its streams are on shards, .* go on with --engine ray"):
        asyncio.run(begun(core, process))
    del core.merged["shards"]
    asyncio.run(begun(core, process))
    with pytest.raises(ShardError, match=r"one process has written it, .* go on without --engine ray"):
        asyncio.run(begun(core, ray))
