"""Recorders that break, are drained, hang, restart, shut down and change versions at random: no false end of a breach.

The model knows of each recorder what it observed last of each slice. A breach is resolved only if nobody who broke a
slice of it, and has not shut down since, was seen bad last; once all measure well, it ends.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.judge.conftest import NOW, Sender, info_request, merge
from tests.tools.fleet import SLICED, Fleet

pytestmark = pytest.mark.slow

SLICES = ("code", "prose")
WINDOW = 60.0


@dataclass
class Recorder:
    """A process that measures version b, or c after it has moved."""

    name: str
    senders: dict[tuple[str, str], Sender] = field(default_factory=dict)
    serves: set[str] = field(default_factory=lambda: set(SLICES))
    breaks: set[str] = field(default_factory=set)
    alive: bool = True
    hangs: bool = False
    version: str = "b"
    versions: set[str] = field(default_factory=lambda: {"b"})
    last: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """When it last observed each slice on version b, and whether that was bad."""
    ended: float = 0.0

    def reports(self, now: float) -> Iterator[ExportMetricsServiceRequest]:
        if self.hangs or not self.alive:
            return
        observed: dict[tuple[str, str], list[float]] = {}
        for slice in self.serves:
            bad = slice in self.breaks
            for of in (slice, "all"):
                observed.setdefault((self.version, of), []).extend([0.4 if bad else 0.001] * 500)
            if self.version == "b":
                self.last[slice] = now, bad
        for version, of in observed.keys() - self.senders.keys():
            made = Sender(instance=self.name, slice=of, inference=version * 12, start=now - 10.0)
            self.senders[version, of] = made
        sent = [sender.request(now, np.array(observed.get(key, []))) for key, sender in self.senders.items()]
        infos = [info_request(now, int(of == self.version), self.name, of * 12) for of in self.versions]
        yield merge(*sent, *infos)

    def act(self, what: str, chance: random.Random, now: float) -> list[ExportMetricsServiceRequest]:
        match what:
            case "break":
                self.breaks.add(chance.choice(SLICES))
            case "mend":
                self.breaks.clear()
            case "serve":
                self.serves = set(chance.choice([(), ("code",), ("prose",), SLICES, SLICES]))
            case "hang" | "go on":
                self.hangs = what == "hang"
            case "restart" if self.alive and not self.hangs:
                self.senders.clear()
            case "shut down" if self.alive and not self.hangs:
                gone = [info_request(now, 0, self.name, version * 12) for version in self.versions]
                self.alive, self.ended, self.versions = False, now, set()
                self.senders.clear()
                return [merge(*gone)]
            case "start" if not self.alive:
                self.alive, self.hangs, self.version, self.versions = True, False, "b", {"b"}
            case "move" if self.alive:
                self.version = "c"
                self.versions.add("c")
            case "return" if self.alive:
                self.version = "b"
        return []


ACTIONS = (
    "break", "break", "mend", "serve", "serve", "hang", "go on", "restart", "shut down", "start", "move", "return",
)  # fmt: skip


class Machine:
    """Recorders x, y and z, and the evaluator that they report to."""

    def __init__(self, path: Path, *, columns: bool) -> None:
        self.fleet, self.columns = Fleet(path, text=SLICED), columns
        self.fleet.judged_after = 0.5
        self.recorders = [Recorder(name) for name in "xyz"]
        self.seen: set[str] = set()

    def step(self, first: list[ExportMetricsServiceRequest]) -> None:
        fleet = self.fleet
        fleet.now += 10.0
        for message in [*first, *(message for recorder in self.recorders for message in recorder.reports(fleet.now))]:
            taken = fleet.core.evaluator.columns_of(message.SerializeToString(), 1000) if self.columns else None
            fleet.core.metrics(message if taken is None else taken, fleet.now)
        fleet.core.tick(fleet.now + fleet.judged_after)
        for incident in fleet.core.past.over("policy", 0, 50):
            if incident.id not in self.seen and (incident.on, incident.kernel_inference) == ("fail", "b" * 12):
                self.seen.add(incident.id)
                if incident.state_text == "Resolved":
                    assert self.owing({cell.slice: cell.since for cell in incident.cells}) == []

    def owing(self, broken: dict[str, float]) -> list[tuple[float, str, str]]:
        """Recorders that were seen bad last on a broken slice, or on any where all traffic is."""
        return [
            (self.fleet.now - NOW, recorder.name, slice)
            for recorder in self.recorders
            for of, since in broken.items()
            for slice in (SLICES if of == "all" else [of])
            for at, bad in [recorder.last.get(slice, (0.0, False))]
            if bad and recorder.ended < at and at >= since - WINDOW
        ]

    def restart(self, seconds: float) -> None:
        self.fleet.connection.close()
        self.fleet.now += seconds
        self.fleet.begin()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_breach_is_resolved_by_those_who_broke_it_and_ends_once_all_is_well(tmp_path, seed, columns):
    chance, machine = random.Random(seed), Machine(tmp_path / "state.sqlite", columns=columns)
    for _ in range(6):
        machine.step([])
    for _ in range(150):
        if chance.random() < 0.05:
            machine.restart(chance.choice([0.0, 30.0, 120.0]))
        acts = chance.random() < 0.25
        recorder = chance.choice(machine.recorders)
        machine.step(recorder.act(chance.choice(ACTIONS), chance, machine.fleet.now) if acts else [])
    for recorder in machine.recorders:
        recorder.act("start", chance, machine.fleet.now)
        recorder.hangs, recorder.version, recorder.serves = False, "b", set(SLICES)
        recorder.breaks.clear()
    for _ in range(45):
        machine.step([])
    assert [incident for incident in machine.fleet.core.incidents() if incident.kernel_inference == "b" * 12] == []
    machine.fleet.connection.close()
