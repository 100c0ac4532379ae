"""A contract that runs dry is judged like any other, and nothing follows from it but a record of what would have."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kc_otel.contract.model import Contract
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.core import Core
from kc_otel.serve.server import ServiceError, run
from tests.tools.api import client_of


@pytest.fixture
def start(contract: Contract, open_file: Callable) -> Callable[..., Core]:
    def make(path: Path | None = None, *, dry: bool = True) -> Core:
        names = {"policy"} if dry else ()
        return Core([contract], open_file(path), external_url="", now=time.time(), dry_run=names)

    return make


def kinds(core: Core) -> list[str]:
    return [event.kind for event in core.events.newest(limit=1000) if event.kind != "verdict"]


def test_a_dry_run_does_nothing_and_says_what_it_would_do(start: Callable[..., Core], drift: Callable) -> None:
    """No webhook, route or directive; events, an announcement, alerts and the overview tell what would be."""
    core, said = start(), []
    core.events.announce = lambda announcement: said.append((announcement.severity, announcement.message))
    core.metrics(drift(0.3))
    core.tick(time.time())
    assert core.outbox.messages() == ()
    assert (core.decisions.routes, core.decisions.directives) == ((), ())
    assert "kc_action_active{" not in client_of(core).get("/metrics").text
    assert kinds(core) == ["dry-run", "would-fire", "would-fire"]
    would = "it would route:train-kernel, webhook:pager, halt"
    of = "for vllm bfloat16 (25b987d00657) against torch float32 (49842c69719e)"
    assert ("info", f"policy: dry run: token-tv is broken on slice code {of}; {would}") in said
    assert core.events.newest(limit=1)[0].data["dry_run"] is True
    client = client_of(core)
    assert {alert["dry_run"] for alert in client.get("/api/v1/alerts").json()["alerts"]} == {True}
    assert client.get("/api/v1/decisions").json()["routes"] == []
    overview = client.get("/api/v1/overview").json()
    assert [entry["text"] for entry in overview["in_force"]] == ["policy is in dry run: its actions are only recorded"]
    actions = {action["kind"] for incident in overview["incidents"] for action in incident["actions"]}
    assert actions == {"would-fire"}


def test_a_dry_run_goes_on_until_a_start_that_is_not_dry(start, drift, tmp_path):
    """What it would have done is not said twice; the breach that it saw fires again then, and is told and routed."""
    path, request = tmp_path / "state.sqlite", drift(0.3)
    core = start(path)
    core.metrics(request)
    core.tick(time.time())
    core.connection.close()
    dry = start(path)
    dry.tick(time.time())
    assert kinds(dry) == ["dry-run", "would-fire", "would-fire"]
    dry.connection.close()
    again = start(path, dry=False)
    assert again.policies["policy"].alerts == ()
    again.tick(time.time())
    assert len(again.outbox.messages()) == 1
    assert {route.slice for route in again.decisions.routes} == {"all", "code"}
    assert kinds(again)[-5:] == ["would-resolve", "would-resolve", "dry-run", "firing", "firing"]


def test_a_start_that_is_dry_lifts_no_route(start: Callable[..., Core], drift: Callable, tmp_path: Path) -> None:
    """A person lifts it; what holds while an alert fires ends with it, and who was told hears that nobody follows."""
    path, request = tmp_path / "state.sqlite", drift(0.3)
    core = start(path, dry=False)
    core.metrics(request)
    core.tick(time.time())
    core.connection.close()
    again = start(path)
    again.tick(time.time())
    assert {route.slice for route in again.decisions.routes} == {"all", "code"}
    assert again.decisions.directives == ()
    assert again.decisions.version > core.decisions.version
    told = [json.loads(message.body)["notification_reason"] for message in again.outbox.messages()]
    assert told == ["unfollowed", "firing"]  # newest first


def test_a_name_that_is_not_served_cannot_run_dry(contract: Contract) -> None:
    """Otherwise a misspelt name would act in earnest."""
    with pytest.raises(ServiceError, match="no contract 'polcy' is served; there are policy"):
        run([contract], ServeConfig(dry_run_contracts=("polcy",)))
