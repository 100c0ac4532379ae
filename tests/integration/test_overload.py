"""One who floods does not stop, blind or fill the evaluator for others; `bench_overload.py` is the same for minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.bench_long_exports import long_exports
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
    assert max(found.health) < 5.0
    assert found.flooded[0] == 0, "every connection was answered"
    assert set(found.flooded) <= {200, 503}
    taken = found.requests["http accepted"] + found.requests.get("http partial", 0)
    assert found.flooded[200] + len(found.waits) == taken
    assert sum(found.points.values()) == found.flooded[200] * POINTS + len(found.waits), "every point is counted"
    assert found.points["unjudged"] > 0
    assert found.told > 0


@pytest.mark.slow
def test_long_exports_at_once_all_get_through(tmp_path: Path) -> None:
    """Twenty of them over both transports, more than there is room for: each is answered, counted, and taken."""
    found = long_exports(tmp_path, senders=20, points=12_000)
    assert found.silent == []
    assert found.answers["http 200"] == found.answers["grpc OK"] == 10
    assert set(found.answers) <= {"http 200", "grpc OK", "http 503", "grpc UNAVAILABLE"}
    counted = Counter[str]()
    for said, number in found.requests.items():
        counted[said.split()[0]] += number
    told = Counter[str]()
    for said, number in found.answers.items():
        told[said.split()[0]] += number
    assert counted == told, "every answer is counted"
    assert found.points["accepted"] + found.points.get("late", 0) >= 20 * 12_000
    assert max(found.health) < 5.0
    assert found.memory < 640 * 2**20
