"""An evaluator that has run for hours has the memory that it will have."""

import gc
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state
from tests.tools.many_cells import START, Fleet, contract, take

EVERY = 60.0
"""Seconds from one report, and round, to the next."""
HOUR = round(3600.0 / EVERY)


def held() -> int:
    """Bytes in use, without what waits for the collector."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
def test_rounds_take_no_memory_once_the_long_window_is_full(tmp_path: Path) -> None:
    """Two hours of forty cells whose numbers change all the time: some bytes for each of them, where it was 407."""
    judged = contract(4)
    fleet = Fleet(["all", *judged.slices], [("a" * 12, "b" * 12)], 1)
    with closing(open_state(tmp_path / "state")) as connection:
        core = Core([judged], connection, external_url="", now=START)

        def hours(first: int, last: int) -> None:
            for number in range(first * HOUR, last * HOUR):
                now = START + EVERY * (number + 1)
                take(core.evaluator, fleet.request(now).SerializeToString(), now)
                core.tick(now)

        hours(0, 1)
        tracemalloc.start()
        hours(1, 3)  # what was there before is not seen until something else is in its place
        before = held()
        hours(3, 5)
        grown = held() - before
        tracemalloc.stop()
        assert len(core.history.cells()) == len(fleet.keys) == 40
    assert grown / (2 * HOUR * len(fleet.keys)) < 16.0
