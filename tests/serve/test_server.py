"""The start of the evaluator: who is let in, which ports there are, and who holds the state file."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from kc_otel.serve import server
from kc_otel.serve.access import site_guard
from kc_otel.serve.access.site_guard import reachable_from_elsewhere
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.self_metrics import TelemetryExporter
from kc_otel.serve.server import ServiceError, active
from kc_otel.serve.store.state_file import StateError, StateHeldError, open_state
from tests.serve.conftest import POLICY
from tests.tools.servers import free_address

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "", "10.1.2.3", "fd00::1", "no-such-name.invalid"])
def test_listening_where_others_reach_it_is_refused(host, monkeypatch):
    """Every address but loopback's, and names that cannot be told; the error names what to say instead."""
    monkeypatch.setattr(server, "_serve", None)  # it must not come to that
    with pytest.raises(ServiceError, match="--allow-unauthenticated"):
        server.run([], ServeConfig(host=host))


def test_loopback_is_nobody_elses(monkeypatch):
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"):
        assert not reachable_from_elsewhere(host), host
    found = [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.1", "10.1.2.3")]
    monkeypatch.setattr(site_guard.socket, "getaddrinfo", lambda *_, **__: found)
    assert reachable_from_elsewhere("two-homes"), "one of its addresses is not loopback's"


def test_whoever_says_so_listens_anywhere(monkeypatch):
    went_on = []

    async def serve(*_args):
        went_on.append(True)

    monkeypatch.setattr(server, "_serve", serve)
    server.run([], ServeConfig(host="0.0.0.0", allow_unauthenticated=True))
    assert went_on == [True]


def test_an_evaluator_exports_nothing_to_itself(caplog):
    """A shell that is set up for recorders starts it, too; where its own metrics go elsewhere, they go there."""
    itself, elsewhere = "http://localhost:4318", "http://127.0.0.1:9"
    for metrics, exports in ((None, False), (itself, False), (elsewhere, True)):
        named = {} if metrics is None else {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": metrics}
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": itself, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", **named}
        exporter = TelemetryExporter({}, own_ports={4317, 4318}, environ=environ)
        assert exporter.speaks is exports
        exporter.shutdown(0.1)
    assert caplog.text.count("own metrics are not exported: http://localhost:4318 is this evaluator") == 2


def test_the_command_refuses_in_one_line(tmp_path):
    """`kc-otel serve --host 0.0.0.0` ends with 2 and a sentence, before any port is open."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    app = typer.Typer()
    register(app, "serve")
    found = CliRunner().invoke(
        app, [str(tmp_path / "policy.yaml"), "--host", "0.0.0.0", "--state", ":memory:", "--no-webhooks"]
    )
    assert found.exit_code == 2
    assert "--allow-unauthenticated" in found.output
    assert "Traceback" not in found.output


def test_prompts_are_shown_to_other_machines_with_tokens_only(monkeypatch):
    """Certificates and a kind network say which machines come, not which people may read."""
    monkeypatch.setattr(server, "_serve", None)
    open_to_all = ServeConfig(host="0.0.0.0", allow_unauthenticated=True, worst=(Path("worst.sqlite"),))
    for config in (open_to_all, replace(open_to_all, tls_client_authority=Path("ca.pem"))):
        with pytest.raises(ServiceError, match=r"--worst shows people.s prompts and answers.*--access FILE"):
            server.run([], config)


@pytest.mark.parametrize("others", ["http_port", "grpc_port"])
def test_two_equal_ports_are_refused_at_the_start(others: str) -> None:
    port = int(free_address().rpartition(":")[2])
    ports = {"grpc_port": 0, "http_port": 0, "api_port": port, others: port}
    with pytest.raises(ServiceError, match=f"cannot listen for OTLP/.* on 127.0.0.1:{port}"):
        server.run([], replace(ServeConfig(), **ports))


def test_a_second_evaluator_is_refused_unless_it_stands_by(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    holder = open_state(path)
    with pytest.raises(StateHeldError, match="start with --standby to take over"):
        open_state(path, patience=0.0)
    holder.close()
    open_state(path).close()


@pytest.mark.slow
async def test_a_standby_takes_over_when_the_file_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LOOK_SECONDS", 0.01)
    path = tmp_path / "state.sqlite"
    holder = open_state(path)
    holder.execute("CREATE TABLE written (a)")
    waiting = asyncio.create_task(active(path, asyncio.Event(), standby=True))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    holder.close()
    connection = await asyncio.wait_for(waiting, 5)
    assert connection is not None
    assert connection.execute("SELECT count(*) FROM written").fetchone() == (0,)
    connection.close()


async def test_a_standby_that_is_told_to_stop_stops(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    holder = open_state(path)
    stop = asyncio.Event()
    waiting = asyncio.create_task(active(path, stop, standby=True))
    await asyncio.sleep(0.05)
    stop.set()
    assert await asyncio.wait_for(waiting, 5) is None
    holder.close()


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_state_file_that_is_moved_away_is_noticed(tmp_path: Path, how: str) -> None:
    """Its lock guards nothing any more: another evaluator could open a new file at the same path."""
    path = tmp_path / "state.sqlite"
    connection = open_state(path)
    connection.check_place()
    path.rename(tmp_path / "backup.sqlite")
    if how == "replaced":
        open_state(path).close()
    with pytest.raises(StateError, match="another evaluator may be acting"):
        connection.check_place()
    connection.close()


def test_a_new_file_may_be_begun_where_another_was_that_is_still_held(tmp_path: Path) -> None:
    """What lies beside it is of the one that was moved away, and is not taken for its own."""
    path = tmp_path / "state.sqlite"
    holds = "import sys; from pathlib import Path; from kc_otel.serve.store.state_file import open_state\n"
    holds += "held = open_state(Path(sys.argv[1])); held.execute('CREATE TABLE a (b)'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        path.rename(tmp_path / "moved.sqlite")
        connection = open_state(path)
        connection.execute("CREATE TABLE c (d)")
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("c",)]
        connection.close()
        holder.communicate("end\n")
        assert holder.returncode == 0
