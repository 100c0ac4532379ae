"""One who floods does not stop, blind or fill the evaluator for others; `bench_overload.py` is the same for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bench_overload import POINTS, overload


@pytest.mark.slow
def test_a_flood_of_label_values_keeps_no_honest_sender_out(tmp_path: Path) -> None:
    """Forty connections, 30,000 new kernel versions, a webhook that never answers: bounded, counted, told, judged."""
    found = overload(6.0, tmp_path, values=30_000)
    assert found.values >= 30_000
    assert found.status == "FAIL"
    assert len(found.waits) >= 3
    assert found.pending > 0
    assert found.memory < 400 * 2**20
    assert found.flooded[0] == 0, "every connection was answered"
    assert set(found.flooded) <= {200, 503}
    taken = found.requests["http accepted"] + found.requests.get("http partial", 0)
    assert found.flooded[200] + len(found.waits) == taken
    assert sum(found.points.values()) == found.flooded[200] * POINTS + len(found.waits), "every point is counted"
    assert found.points["unjudged"] > 0
    assert found.told > 0
