"""Shards in front of one judge say what one process says, whoever crashes when, and however many there are."""

import asyncio
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel import machine_code
from kc_otel.contract.load import load_text
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.requests import BadRequestError, ExportResult, InternalError, Limits, ThrottledError
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.shard_state import ShardBatch, ShardNotes, ShardState, mark_sent, merge, unsent_batch
from kc_otel.judge.verdict import Status
from kc_otel.serve import shards as shards_module
from kc_otel.serve.core import Core
from kc_otel.serve.shards import Shard, ShardedSink, ShardError, split
from kc_otel.serve.store.state_file import StateError, open_state
from tests.judge.conftest import Sender, applying, info_request, make_contract
from tests.judge.conftest import merge as merged
from tests.tools.contracts import contract_of
from tests.tools.exact_senders import CONTRACT, rounds
from tests.tools.full_disk import refuse_commits, relieve
from tests.tools.verdicts import windows_of

pytestmark = pytest.mark.anyio

POLICY = load_text(CONTRACT, "policy.yaml")
START = 1_700_000_000.0


class LocalShard:
    """A shard in this process, that can be lost like one in another."""

    def __init__(self, folder: Path, *, columns: bool) -> None:
        self._folder, self._columns = folder, columns
        self.lose_after: set[str] = set()
        self.lost = 0
        self.shard: Shard | None = self._begun()

    def _begun(self) -> Shard:
        with pytest.MonkeyPatch.context() as patch:
            if not self._columns:
                patch.setattr(machine_code, "is_available", lambda: False)
            return Shard([POLICY], self._folder, Limits())

    def lose(self) -> None:
        """Nothing more is written; another one begins."""
        assert self.shard is not None
        self.shard._connection.close()
        self.shard, self.lost = self._begun(), self.lost + 1

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self.shard is not None
        answer = getattr(self.shard, method)(*arguments)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if method in self.lose_after:
            self.lose_after.discard(method)
            self.lose()
            raise ConnectionError("lost")
        return answer

    async def take(self, body: bytes, at: float) -> Any:
        return await self._call("take", body, at)

    async def report(self, settled: int, now: float) -> Any:
        return await self._call("report", settled, now)

    def stop(self) -> None:
        if self.shard is not None:
            self.shard.close()
            self.shard = None


class Clock:
    """The time that everything is told."""

    now = START


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock


class Sharded:
    """A core behind shards of its own, each in a folder below `folder`."""

    def __init__(self, folder: Path, *, columns: bool = False) -> None:
        self.folder, self.columns = folder, columns
        self.shards: dict[int, LocalShard] = {}
        self.begin()

    def begin(self) -> None:
        self.connection = open_state(self.folder / "state")
        self.core = Core([POLICY], self.connection, external_url="http://evaluator", now=START)
        self.sink = ShardedSink(self.core, self.start)

    def start(self, number: int) -> LocalShard:
        self.shards[number] = LocalShard(self.folder / f"shard-{number}", columns=self.columns)
        return self.shards[number]

    def crash(self) -> None:
        """The judge's process ends, and its shards with it."""
        self.connection.close()
        self.sink.close()

    async def send(self, body: bytes) -> None:
        """As a sender does: again until it is taken."""
        while True:
            try:
                await self.sink.metrics(self.sink.read(body, Limits()))
            except ThrottledError:
                await asyncio.sleep(0)
            else:
                return


@pytest.fixture
def sharded(clock: Clock, tmp_path: Path) -> Iterator[Callable[..., Sharded]]:  # noqa: ARG001 - it sets the time
    made: list[Sharded] = []

    def make(**options: Any) -> Sharded:
        made.append(Sharded(tmp_path / f"sharded-{len(made)}", **options))
        return made[-1]

    yield make
    for process in made:
        process.crash()


def said(core: Core) -> dict[str, Any]:
    """All that a core says: verdicts, incidents, events, messages, windows, kernels."""
    return {
        "verdicts": [repr(cell) for cell in core.history.cells()],
        "incidents": [repr(replace(incident, id="")) for incident in core.incidents()],
        "events": [repr(event) for event in core.events.newest(limit=10_000)],
        "held": {cell: repr(held) for cell, held in core.evaluator.states["policy"].evidence.cells.items()},
        "windows": {key: repr(window) for key, window in windows_of(core.evaluator, time.time()).items()},
        "invalid": core.evaluator.invalid_input("policy", time.time()),
        "kernels": core.evaluator.kernels("policy"),
        "messages": [endpoint.waiting for endpoint in core.outbox.status()],
    }


def alone(seconds: Sequence[tuple[float, list[bytes]]], clock: Clock) -> Core:
    connection = open_state(None)
    core = Core([POLICY], connection, external_url="http://evaluator", now=START)
    weakref.finalize(core, connection.close)
    for at, bodies in seconds:
        clock.now = at
        for body in bodies:
            core.metrics(ExportMetricsServiceRequest.FromString(body), at)
        core.tick(at)
    return core


async def told(sharded: Sharded, seconds: Sequence[tuple[float, list[bytes]]], clock: Clock) -> None:
    for at, bodies in seconds:
        clock.now = at
        await asyncio.gather(*(sharded.send(body) for body in bodies))
        await sharded.sink.tick()


@pytest.fixture
def seconds() -> list[tuple[float, list[bytes]]]:
    return list(rounds(8, 16, START))


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "columns"), [(1, False), (3, False), (3, True)])
async def test_verdicts_incidents_and_counts_are_those_of_one_process(sharded, clock, seconds, shards, columns):
    """The same exports at the same times: byte for byte the same verdicts, windows, evidence, events and counters."""
    single = alone(seconds, clock)
    several = sharded(columns=columns)
    await several.sink.start(shards)
    await told(several, seconds, clock)
    assert said(several.core) == said(single)
    assert several.core.evaluator.counters == single.evaluator.counters
    assert several.core.evaluator.events == single.evaluator.events
    assert {verdict.status for verdict, _ in single.history.cells()} >= {Status.FAIL}
    assert sum(bool(shard.shard.evaluator.stream_count) for shard in several.shards.values()) == shards
    columns &= machine_code.is_available()
    assert any(shard.shard.evaluator.taken_as_columns for shard in several.shards.values()) == columns


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_a_crash_anywhere_loses_nothing_and_counts_nothing_twice(sharded, clock, seconds, seed):
    """Shards are lost after whatever call, the judge before and after it writes: what is said is the same."""
    rng = random.Random(seed)
    single, several = alone(seconds, clock), sharded()
    lost: list[LocalShard] = []
    await several.sink.start(3)
    for at, bodies in seconds:
        clock.now = at
        for shard in several.shards.values():
            if rng.random() < 0.3:
                shard.lose_after.add(rng.choice(("take", "report")))
        await asyncio.gather(*(several.send(body) for body in bodies))
        if rng.random() < 0.2:
            refuse_commits(several.connection)
            with pytest.raises(StateError):
                await several.sink.tick()
            relieve(several.connection)
        if rng.random() < 0.2:
            lost.extend(several.shards.values())
            several.crash()
            several.begin()
            await several.sink.start(3)
        for shard in several.shards.values():
            shard.lose_after.discard("take")
        while any(shard.trouble for shard in several.core.shards) or not several.core.shards:
            await several.sink.tick()
        await several.sink.tick()
    assert sum(shard.lost for shard in [*lost, *several.shards.values()]) > 5
    expected, found = said(single), said(several.core)
    for what in ("windows", "invalid", "kernels"):
        assert found[what] == expected[what], what
    verdicts = {(v.cell, v.status, v.estimate, v.samples) for v, _ in several.core.history.cells()}
    assert verdicts == {(v.cell, v.status, v.estimate, v.samples) for v, _ in single.history.cells()}
    assert len(several.core.incidents()) == len(single.incidents())


async def test_a_state_file_keeps_its_number_of_shards(sharded, clock, seconds):
    """Another number would give senders to shards that do not know their streams."""
    several = sharded()
    await several.sink.start(2)
    await told(several, seconds[:1], clock)
    several.crash()
    several.begin()
    with pytest.raises(ShardError, match="on 2 shards; give --shards 2"):
        await several.sink.start(3)


async def test_what_a_shard_cannot_take_waits_with_its_sender(sharded, monkeypatch):
    """More bytes than may wait, a shard that does not answer, one that is gone: asked to come again, and told why."""
    [(_, bodies)] = rounds(2, 1, START)
    several = sharded()
    blocked = asyncio.Event()
    await several.sink.start(1)
    line = several.sink._shards[0]
    monkeypatch.setattr(shards_module, "_ANSWER_SECONDS", 0.05)
    real = several.shards[0].take

    async def slow(*export: Any) -> Any:
        await blocked.wait()
        return await real(*export)

    several.shards[0].take = slow
    monkeypatch.setattr(shards_module, "_MAX_WAITING_BYTES", 1)
    first = asyncio.create_task(several.sink.metrics(several.sink.read(bodies[0], Limits())))
    await asyncio.sleep(0)
    with pytest.raises(ThrottledError, match="more arrives than shard 0 takes"):
        await several.sink.metrics(several.sink.read(bodies[1], Limits()))
    with pytest.raises(ThrottledError, match="shard 0 does not answer"):
        await first
    assert line.waiting == 0
    blocked.set()
    await several.send(bodies[0])  # one that asks finds it is back

    async def gone(*_: Any) -> Any:
        raise ConnectionError

    several.shards[0].take = gone
    with pytest.raises(ThrottledError, match="is not there"):
        await several.sink.metrics(several.sink.read(bodies[1], Limits()))


@pytest.mark.slow
async def test_a_shard_that_does_not_answer_is_said_and_keeps_no_other_from_being_judged(sharded, clock, monkeypatch):
    """`/readyz` and `status` name it; its batch comes when it is back."""
    monkeypatch.setattr("kc_otel.serve.shards._SHARD_WAIT_SECONDS", 0.05)
    [(_, bodies)] = rounds(6, 1, START)
    several = sharded()
    stopped = asyncio.Event()
    await several.sink.start(2)
    real = several.shards[1].report

    async def report(settled: int, now: float) -> Any:
        await stopped.wait()
        return await real(settled, now)

    several.shards[1].report = report
    await asyncio.gather(*(several.send(body) for body in bodies))
    clock.now += 10.0
    await several.sink.tick()
    some = several.core.evaluator.counters["accepted"]
    assert some > 0
    assert "shard 1" in several.core.evaluator.faults.present[""]
    assert several.core.shards[1].trouble == "has not answered for 10 s"
    stopped.set()
    await several.sink.tick()
    await several.sink.tick()
    assert several.core.evaluator.counters["accepted"] > some
    assert several.core.evaluator.faults.present == {}
    assert several.core.shards[1].trouble == ""


def test_a_start_ends_where_a_shard_does_not_answer(sharded, monkeypatch):
    monkeypatch.setattr(shards_module, "_START_SECONDS", 0.2)
    several = sharded()

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    def start(number: int) -> LocalShard:
        shard = several.start(number)
        shard.report = never if number else shard.report
        return shard

    several.sink._begin = start
    with pytest.raises(ShardError, match=r"shard 1 has not answered for 0 s; .*`ray status`.* --shard-cpus"):
        asyncio.run(several.sink.start(2))


async def test_an_export_that_a_shard_fails_on_is_refused_alone(sharded, monkeypatch):
    """A fault of ours is its sender's 500, and those that travelled with it are taken."""
    [(_, bodies)] = rounds(3, 1, START)
    several = sharded()
    await several.sink.start(1)
    judge = several.shards[0].shard.evaluator
    real = judge.ingest_metrics

    def failing(request: Any, now: float) -> Any:
        if b"trainer-1" in request.SerializeToString():
            raise RuntimeError
        return real(request, now)

    monkeypatch.setattr(judge, "ingest_metrics", failing)
    sent = (several.sink.metrics(several.sink.read(body, Limits())) for body in bodies[:3])
    results = await asyncio.gather(*sent, return_exceptions=True)
    assert [type(result) for result in results] == [ExportResult, InternalError, ExportResult]


async def test_what_is_no_export_is_refused_by_whoever_reads_it(sharded: Callable[..., Sharded]) -> None:
    """Bytes that end within a field, that are no resource, or that only the shard reads: 400, and nothing of it."""
    several = sharded()
    await several.sink.start(2)
    for body in (b"\x0a\x7f", b"\x0a\x02\x0a\x7f", b"\x0a\x04\x0a\x02\x0a\x7f", b"\x0a\x04\x12\x02\x12\x7f"):
        with pytest.raises(BadRequestError):
            await several.sink.metrics(several.sink.read(body, Limits()))


async def test_a_folder_that_is_not_this_states_is_refused(sharded, clock, seconds, tmp_path):
    """An empty one would count senders' sums again, one of another state has told that one: both are said, at once."""
    several = sharded()
    await several.sink.start(1)
    await told(several, seconds[:3], clock)
    several.crash()
    used = several.folder / "shard-0"
    used.rename(several.folder / "elsewhere")
    several.begin()
    with pytest.raises(ShardError, match="shard 0 has not the folder that this state file knows"):
        await several.sink.start(1)
    several.crash()
    used.rename(tmp_path / "empty")
    (several.folder / "elsewhere").rename(used)
    several.begin()
    await several.sink.start(1)
    await told(several, seconds[3:4], clock)
    assert several.core.evaluator.counters["accepted"] > 0
    several.crash()
    (several.folder / "state").unlink()
    several.begin()
    with pytest.raises(ShardError, match="shard 0 has not the folder that this state file knows"):
        await several.sink.start(1)


async def test_a_shard_that_begins_again_without_its_folder_takes_nothing(sharded, clock, seconds):
    """As on a node that has not the same storage: it is named, and nothing counts twice."""
    several = sharded()
    await several.sink.start(1)
    await told(several, seconds[:3], clock)
    before = several.core.evaluator.counters.copy()
    several.shards[0]._folder = several.folder / "not-shared"
    several.shards[0].lose()
    (at, bodies), clock.now = seconds[3], seconds[3][0]
    await several.send(bodies[0])  # nobody knows yet
    await several.sink.tick()
    assert several.core.evaluator.counters == before
    assert "has not the folder" in several.core.shards[0].trouble
    with pytest.raises(ThrottledError, match="shard 0 has not the folder"):
        await several.sink.metrics(several.sink.read(bodies[1], Limits()))
    assert at == clock.now


def test_what_a_shard_says_is_on_its_disk(clock: Clock, tmp_path: Path, seconds: Any) -> None:
    """The judge counts what it is told, and the shard forgets it: a batch that is not on the disk is not told."""
    clock.now, bodies = seconds[0]
    shard = Shard([POLICY], tmp_path / "shard", Limits())
    with closing(shard):
        asyncio.run(taken(shard, [(body, clock.now) for body in bodies]))

        refuse_commits(shard._connection)
        with pytest.raises(StateError, match="cannot be written"):
            asyncio.run(shard.report(0, clock.now))
        relieve(shard._connection)
        assert asyncio.run(shard.report(0, clock.now))[0].counted


async def taken(shard: Shard, exports: Sequence[tuple[bytes, float]]) -> None:
    await asyncio.gather(*(shard.take(*export) for export in exports))


def observations(*batches: ShardBatch) -> Counter[SeriesKey]:
    """How many each series has in batches, of which one may be there twice."""
    counts = Counter[SeriesKey]()
    for batch in {batch.number: batch for batch in batches}.values():
        for counted in batch.counted:
            counts[counted.key] += counted.histogram.count
    return counts


@pytest.mark.parametrize("passes", range(6))
def test_what_comes_while_a_batch_waits_for_the_disk_is_told(clock, tmp_path, seconds, passes):
    """What a batch takes out of the inbox is in it, also where the shard ends before the next one."""
    known, new = ([(body, at) for body in bodies] for at, bodies in seconds[:2])
    clock.now = seconds[1][0]

    async def later(shard: Shard) -> ShardBatch:
        for _ in range(passes):  # of the event loop, while exports are written and applied
            await asyncio.sleep(0)
        return (await shard.report(0, clock.now))[0]

    async def told(shard: Shard) -> ShardBatch:
        await taken(shard, known)
        return (await asyncio.gather(taken(shard, new), later(shard)))[1]

    with closing(Shard([POLICY], tmp_path / "shard", Limits())) as shard:
        first = asyncio.run(told(shard))
    with closing(Shard([POLICY], tmp_path / "shard", Limits())) as again:
        second = asyncio.run(again.report(first.number, clock.now))[0]
    with closing(Shard([POLICY], tmp_path / "calm", Limits())) as calm:
        asyncio.run(taken(calm, known + new))
        expected = asyncio.run(calm.report(0, clock.now))[0]
    assert observations(first, second) == observations(expected)


def test_what_a_shard_refuses_is_told_once_to_the_judge() -> None:
    """With the sender's name, until the batch has come; what cannot be sent is told again."""
    shard, judge = Evaluator([POLICY], remember=ShardState), Evaluator([POLICY])
    name, pair = POLICY.name, ("t" * 12, "i" * 12)
    shard.states[name].refused.add("future", pair, "gpu-7", -60.0, START)

    def batch() -> ShardBatch:
        made = unsent_batch(shard, 1, {}, START)
        return replace(made, notes=read_json(dict[str, ShardNotes], to_json(made.notes)))

    first = batch()
    unsent = mark_sent(shard, {})
    assert not batch().notes[name].refused
    unsent()
    assert batch() == first
    merge(judge, [first], START)
    assert judge.missing(name, START) == shard.missing(name, START) != []


def test_the_judge_knows_the_recorders_of_all_shards() -> None:
    """When each reported last, whether it ended, and which slices it applies; what is over does not come back."""
    clause = {"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.1, "cap": 0.5}
    other = contract_of(version=2, slices={"code": {"where": {"task": "math"}}}, statistical=[clause])
    served = contract_of(version=3, slices={"code": {"where": {"task": "code"}}}, statistical=[{**clause, "cap": 0.6}])
    judge, shards = Evaluator([served]), [Evaluator([served], remember=ShardState) for _ in range(2)]
    recorders = judge.states["policy"].recorders

    def told(shard: Evaluator, number: int, at: float) -> None:
        batch = unsent_batch(shard, number, {}, 0.0)
        mark_sent(shard, {})
        merge(judge, [batch], at)

    for number, shard in enumerate(shards):
        shard.ingest_metrics(applying(other, info_request(START, 1, f"gpu-{number}")), START)
        told(shard, 1, START)
    known = recorders.by_version["b" * 12]
    assert {name: (report.otherwise, report.unmeasured) for name, report in known.items()} == {
        "gpu-0": (("code",), ("token-tv",)), "gpu-1": (("code",), ("token-tv",)),
    }  # fmt: skip
    shards[0].ingest_metrics(info_request(START + 10.0, 0, "gpu-0"), START + 10.0)
    told(shards[0], 2, START + 10.0)
    assert recorders.by_version["b" * 12].keys() == {"gpu-1"}
    assert not recorders.all_ended("b" * 12, START, 60.0)
    stale = Evaluator([served], remember=ShardState)
    stale.ingest_metrics(info_request(START, 1, "gpu-0"), START)
    told(stale, 1, START + 20.0)
    assert recorders.by_version["b" * 12].keys() == {"gpu-1"}
    shards[1].ingest_metrics(info_request(START + 30.0, 0, "gpu-1"), START + 30.0)
    told(shards[1], 2, START + 30.0)
    assert recorders.all_ended("b" * 12, START + 30.0, 60.0)


def test_the_judge_knows_the_pauses_between_runs_that_shards_heard() -> None:
    judge, shard, now = Evaluator([make_contract()]), Evaluator([make_contract()], remember=ShardState), START
    for instance in "abcd":
        for _ in range(3):
            observed = Sender(instance=instance, start=now - 1.0).request(now, [1e-3])
            shard.ingest_metrics(merged(observed, info_request(now, 1, instance)), now)
            batch = unsent_batch(shard, int(now), {}, 0.0)
            mark_sent(shard, {})
            merge(judge, [batch], now)
            now += 10.0
        now += 1500.0
    (heard,) = judge.states["policy"].heard.values()
    assert heard.gaps == next(iter(shard.states["policy"].heard.values())).gaps
    assert heard.patience(60.0) == 70.0


def test_the_judge_knows_which_recorders_of_shards_moved_to_another_version() -> None:
    """One that moved may return; one that returns, or shuts down, has not moved any more. Restarts change nothing."""
    old, new = "b" * 12, "c" * 12
    judge, shard = Evaluator([make_contract()]), Evaluator([make_contract()], remember=ShardState)
    state = judge.states["policy"]

    def told(at: float, **values: int) -> None:
        versions = {"old": old, "new": new}
        requests = [info_request(at, value, "gpu-0", versions[version]) for version, value in values.items()]
        shard.ingest_metrics(merged(*requests), at)
        batch = unsent_batch(shard, int(at), {}, 0.0)
        mark_sent(shard, {})
        merge(judge, [batch], at)

    told(START, old=1)
    told(START + 10.0, old=0, new=1)
    assert state.recorders.all_ended(old, START, 60.0)
    assert state.recorders.moved_since(old)
    told(START + 20.0, old=1, new=0)
    assert [state.recorders.moved_since(version) for version in (old, new)] == [False, True]
    told(START + 30.0, old=0, new=0)
    assert not any(state.recorders.moved_since(version) for version in (old, new))


def request(*senders: dict[str, str]) -> ExportMetricsServiceRequest:
    found = ExportMetricsServiceRequest()
    for number, attributes in enumerate(senders):
        resource = found.resource_metrics.add(schema_url="https://example.org")
        for key, value in attributes.items():
            resource.resource.attributes.add(key=key).value.string_value = value
        resource.scope_metrics.add().metrics.add(name=f"kc.drift.{number}")
    return found


def test_the_parts_of_an_export_are_all_of_it_each_with_its_owner() -> None:
    """A Collector's export of many senders: every resource is in the part of its owner, once, with all that it has."""
    whole = request(*({"service.instance.id": str(number)} for number in range(40)))
    parts = split(whole.SerializeToString(), 3)
    assert sorted(parts) == [0, 1, 2]
    found = {shard: ExportMetricsServiceRequest.FromString(part) for shard, part in parts.items()}
    for resource in whole.resource_metrics:
        alone = ExportMetricsServiceRequest(resource_metrics=[resource]).SerializeToString()
        [(shard, only)] = split(alone, 3).items()
        assert resource in found[shard].resource_metrics
        assert ExportMetricsServiceRequest.FromString(only).resource_metrics[0] == resource
    assert sum(len(part.resource_metrics) for part in found.values()) == 40


def test_a_sender_is_the_set_of_its_attributes() -> None:
    """Their order, and fields that are not known yet, change nothing."""
    for number in range(20):
        pairs = {"service.instance.id": str(number), "host.name": "a"}
        [shard] = split(request(pairs).SerializeToString(), 7)
        turned = request(dict(reversed(pairs.items())))
        assert list(split(turned.SerializeToString(), 7)) == [shard]
        later = request(pairs).SerializeToString() + b"\x98\x06\x01"
        assert list(split(later, 7)) == [shard]
