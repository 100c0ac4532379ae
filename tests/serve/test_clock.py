"""The evaluator's clock is set back or forward: nothing that happened counts as later, and no jump as silence."""

import sqlite3
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.plain_json import not_later
from kc_otel.judge.promotion.stages import PromotionStatus, Stage
from kc_otel.serve import core as core_module
from kc_otel.serve.listeners import Listeners, RouterReport
from tests.judge.conftest import NOW
from tests.tools.api import route_kept
from tests.tools.fleet import Fleet, MakeFleet

VERSION = "b" * 12
AHEAD = 3600.0
ROUTED = "do: [{route: train-kernel}, {webhook: pager}]"


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """One whose clock is an hour ahead."""
    made = make_fleet(ROUTED)
    made.run(60, broken=0.001, healthy=0.001)
    made.now += AHEAD
    return made


def test_what_happened_is_not_later_than_now() -> None:
    reports = {"policy": {"a": RouterReport(NOW - 5.0, NOW + 60.0, NOW + 60.0, ("id",))}}
    assert not_later(reports, NOW, NOW + AHEAD) == {"policy": {"a": RouterReport(NOW - 5.0, NOW, NOW, ("id",))}}
    later = RouterReport(-1.0, NOW + AHEAD + 1.0, 0.5)
    assert not_later(later, NOW, NOW + AHEAD) == later


def test_a_router_of_a_clock_that_was_ahead_has_not_taken_what_is_ordered_now(fleet: Fleet) -> None:
    contract = fleet.contract
    fleet.core.listeners = listeners = Listeners(NOW, {"policy": {"a": RouterReport(NOW, fleet.now, fleet.now)}})
    fleet.run(10, broken=0.001)
    fleet.now -= AHEAD
    fleet.run(10, broken=0.001)
    assert listeners.behind(contract, "all", fleet.now + 10.0, fleet.now + 10.0, fleet.now + 120.0)


@pytest.mark.slow
def test_a_version_that_was_rolled_back_ahead_of_time_and_serves_is_said(fleet: Fleet) -> None:
    fleet.core.promotions.tell("policy", VERSION, "force", "ada", "x", fleet.now, stage=Stage.FULL, start=True)
    fleet.run(10, broken=0.001)
    fleet.core.promotions.tell("policy", VERSION, "rollback", "ada", "x", fleet.now, start=True)
    fleet.run(10, broken=0.001)
    fleet.now -= AHEAD
    fleet.run(120, broken=0.001)
    (promotion,) = fleet.core.promotions.all("policy")
    assert promotion.seen_serving is not None
    fleet.restart()
    assert fleet.core.promotions.all("policy")[0].entered <= fleet.now, "it is kept, too"


@pytest.mark.slow
def test_a_version_that_was_forced_on_ahead_of_time_is_rolled_back_once_it_fails(fleet: Fleet) -> None:
    fleet.run(60, broken=0.4)
    fleet.core.promotions.tell("policy", VERSION, "force", "ada", "x", fleet.now, stage=Stage.CANARY, start=True)
    fleet.run(10, broken=0.4)
    fleet.now -= AHEAD
    fleet.run(240, broken=0.4)
    (promotion,) = fleet.core.promotions.all("policy")
    assert promotion.status is PromotionStatus.ROLLED_BACK


@pytest.mark.slow
def test_a_recorder_that_died_ahead_of_time_is_missed(fleet: Fleet) -> None:
    fleet.run(60, broken=0.001, healthy=0.001)
    for _ in range(2):
        fleet.run(20, broken=0.4, healthy=0.001)
        route_kept(fleet.core, fleet.now)
    fleet.run(10, healthy=None)
    fleet.now -= AHEAD
    for _ in range(10):
        fleet.run(30, healthy=None)
        route_kept(fleet.core, fleet.now)
        assert IncidentState.CONTAINED not in {incident.state for incident in fleet.core.incidents()}
    (incident,) = fleet.core.incidents()
    assert "a recorder of this kernel has not been heard of since" in incident.state_text


def test_a_clock_that_is_set_forward_is_no_heartbeat(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route was taken a moment ago, and the broken kernel may be measured within a heartbeat."""
    fleet, steady = make_fleet(ROUTED), 0.0
    clock = SimpleNamespace(time=lambda: fleet.now, perf_counter=lambda: steady)
    monkeypatch.setattr(core_module, "time", clock)
    fleet.core._clocks = fleet.now, steady

    def step(seconds: float, mean: float | None) -> None:
        nonlocal steady
        steady += seconds
        fleet.now += seconds
        fleet.core.metrics(fleet.report(fleet.senders["broken"], mean), fleet.now)
        fleet.core.tick(fleet.core.clock())
        route_kept(fleet.core, fleet.now)

    for mean in (0.001,) * 6 + (0.4,) * 3:
        step(10.0, mean)
    fleet.now += AHEAD
    for _ in range(3):
        step(1.0, None)
        assert fleet.states() == [IncidentState.BROKEN]
    for _ in range(4):
        step(10.0, None)
    assert fleet.states() == [IncidentState.CONTAINED]


def test_a_table_is_as_old_as_the_last_evaluation_of_any_process(make_fleet: MakeFleet) -> None:
    """A process that was started and has evaluated nothing publishes what an earlier one decided."""
    fleet = make_fleet()
    assert fleet.core.age > 10**9, "none has evaluated"
    fleet.now = time.time() - 600.0
    fleet.run(10, broken=0.001)
    fleet.restart()
    with pytest.raises(sqlite3.Error), mock.patch.object(fleet.core.inbox, "take_out", side_effect=sqlite3.Error):
        fleet.core.tick(time.time())
    assert fleet.core.age == pytest.approx(590.0, abs=60.0), "also where nothing can be written"
