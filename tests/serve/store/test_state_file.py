"""A state file that is damaged is said to be so before anything is decided."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.serve.core import Core
from kc_otel.serve.store.codecs import encode_histogram, encode_stream
from kc_otel.serve.store.state_file import DamagedStateError, open_state
from kc_otel.stats import Buckets, ExponentialHistogram
from tests.serve.conftest import contract, drift, grown, make_core, open_file

__all__ = ["contract", "drift", "make_core", "open_file"]

_PAGE = 4096


@pytest.fixture
def going_on(drift: Callable[..., ExportMetricsServiceRequest]) -> Callable[[float], ExportMetricsServiceRequest]:
    """What a sender says, and what it says later, when it has observed all of it once more."""
    made: dict[float, ExportMetricsServiceRequest] = {}

    def make(sigma: float) -> ExportMetricsServiceRequest:
        if sigma not in made:
            made[sigma] = drift(sigma)
            return made[sigma]
        return grown(made[sigma], 2)

    return make


@pytest.fixture
def state(tmp_path: Path, make_core: Callable[..., Core], going_on: Callable) -> bytes:
    """A state file with panes, alerts, routes and webhooks that wait."""
    path = tmp_path / "sound" / "state.sqlite"
    with closing(open_state(path)) as connection:
        core = make_core(connection, now=time.time())
        for sigma in (0.3, 0.4):
            core.metrics(going_on(sigma))
            core.tick(time.time())
        assert core.decisions.routes
    return path.read_bytes()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A file as a disk or a copy might leave it."""
    found = bytearray(content)
    page = chance.randrange(len(content) // _PAGE) * _PAGE
    match chance.randrange(5):
        case 0:
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        case 1:
            for _ in range(20):
                found[chance.randrange(len(found))] = chance.randrange(256)
        case 2:
            found[page : page + _PAGE] = chance.randbytes(_PAGE)
        case 3:
            found[page : page + _PAGE] = bytes(_PAGE)
        case _:
            del found[chance.randrange(len(found)) :]
    return bytes(found)


@pytest.mark.slow
def test_damage_is_said_at_the_start_or_does_no_harm(state, tmp_path, make_core, going_on):
    chance = random.Random(7)
    said: list[bool] = []
    later = going_on(0.4)
    for number in range(150):
        path = tmp_path / str(number) / "state.sqlite"
        path.parent.mkdir()
        path.write_bytes(damaged(state, chance))
        try:
            with closing(open_state(path)) as connection:
                core = make_core(connection, now=time.time())
                core.tick(time.time())
                core.metrics(later)
                core.tick(time.time())
        except DamagedStateError as error:
            said.append(str(error).startswith(f"{path}: the state file is damaged"))
    assert all(said)
    assert 50 < len(said) < 150


@pytest.mark.slow
def test_damage_among_the_last_commits_takes_the_later_ones_with_it_and_nothing_else(tmp_path, make_core, going_on):
    """What an evaluator that was killed has left in `-wal` counts as far as it is whole, wherever it is damaged."""
    path = tmp_path / "killed" / "state.sqlite"
    log = path.with_name("state.sqlite-wal")
    commits, ticks = list[int](), [-math.inf]
    with closing(open_state(path)) as connection:
        core = make_core(connection, now=time.time())
        for sigma in (0.3, 0.4, 0.4):
            core.metrics(going_on(sigma))
            core.tick(time.time())
            commits.append(log.stat().st_size)
            ticks.append(core.evaluator.judged_at)
        left = path.read_bytes(), log.read_bytes()
    chance, found, said = random.Random(5), list[int](), 0
    for number in range(120):
        again = tmp_path / str(number) / "state.sqlite"
        again.parent.mkdir()
        again.write_bytes(left[0])
        hurt = bytearray(left[1])
        at = chance.randrange(len(hurt))
        hurt[at : at + 20] = chance.randbytes(len(hurt[at : at + 20]))
        if chance.random() < 0.3:
            del hurt[at:]
        again.with_name("state.sqlite-wal").write_bytes(hurt)
        try:
            with closing(open_state(again)) as connection:
                core = make_core(connection, now=time.time())
                found.append(ticks.index(core.evaluator.judged_at))
                assert found[-1] == sum(commit <= at for commit in commits)
                core.tick(time.time())
        except DamagedStateError:
            said += 1
    assert set(found) == {0, 1, 2}
    assert said < 20


FAR = ExponentialHistogram(3, 3, 0.3, 0, Buckets(2**40, np.array([3])), Buckets.empty(), 0.1, 0.1, 0.0)


@pytest.mark.parametrize(
    ("damage", "content"),
    [
        (
            "UPDATE evaluator_values SET data = ? WHERE kind = 'streams'",
            encode_stream(PointStream(1.0, [LatestValue(3, 4, FAR)], [], 0)),
        ),
        ("UPDATE evaluator_panes SET data = ?", encode_histogram(FAR)),
    ],
)
def test_buckets_where_nothing_can_be_are_damage(state, damage, content, tmp_path, make_core):
    """Held against what comes next they would be an array of every bucket between, and its sender refused for ever."""
    path = tmp_path / "state.sqlite"
    path.write_bytes(state)
    with closing(open_state(path)) as connection:
        assert connection.execute(damage, (content,)).rowcount
        with pytest.raises(DamagedStateError, match="the state file is damaged"):
            make_core(connection, now=time.time())
