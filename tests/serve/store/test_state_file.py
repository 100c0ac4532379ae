"""A state file that is damaged is said to be so before anything is decided."""

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import DamagedStateError, open_state
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
