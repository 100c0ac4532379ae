"""Verdicts: those of an evaluation in one list, and made up ones."""

import math
from typing import Any

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.point_streams import PointStream
from kc_otel.judge.series import LONG, SHORT, SeriesKey
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.stats import Binned

__all__ = ["streams_of", "verdict_of", "verdicts_of", "window_of", "windows_of"]


def verdicts_of(evaluator: Evaluator, now: float) -> tuple[Verdict, ...]:
    return tuple(verdict for evaluation in evaluator.evaluate(now).values() for verdict in evaluation.verdicts)


def streams_of(evaluator: Evaluator) -> dict[bytes, PointStream]:
    """Each stream by its digest, in a row or not."""
    found: dict[bytes, PointStream] = {}
    for state in evaluator.states.values():
        found |= state.streams.alone | {name: state.streams.stream(name) for name in state.streams.row_of}
    return found


def windows_of(evaluator: Evaluator, now: float, seconds: float = 300.0) -> dict[tuple[str, SeriesKey], Binned]:
    """What there is of each series of a contract in the window of so many seconds: the short, or the long one."""
    evaluator.settle()
    return {
        (name, key): state.binned(series, SHORT if seconds <= state.contract.observability.window else LONG, now)
        for name, state in evaluator.states.items()
        for key, series in state.series.items()
    }


def window_of(evaluator: Evaluator, cell: Cell, now: float, seconds: float = 300.0) -> Binned:
    """What a cell rests on in the last seconds."""
    return windows_of(evaluator, now, seconds)[cell.contract, evaluator.series_of_cell(cell)]


def verdict_of(
    status: Status | str,
    *,
    clause: str = "token-tv",
    slice: str = "code",
    at: float = 0.0,
    contract: str = "policy-7b",
    train: str = "aaaaaaaaaaaa",
    inference: str = "bbbbbbbbbbbb",
    **changes: Any,
) -> Verdict:
    """A verdict on a mean against a limit of 0.004, with the numbers that go with its status."""
    status = Status(status)
    silent = status is Status.NO_DATA
    estimate, lower, upper = {
        Status.PASS: (0.002, 0.001, 0.003),
        Status.INCONCLUSIVE: (0.004, 0.003, 0.005),
        Status.FAIL: (0.0123, 0.0101, 0.014),
        Status.NO_DATA: (math.nan, math.nan, math.nan),
    }[status]
    numbers = {
        "limit": 0.004, "estimate": estimate, "lower": lower, "upper": upper, "samples": 0 if silent else 3482,
        "window": "" if silent else "short", "method": "mixture betting", "reason": f"{status} because of the numbers",
        "contract_version": 3, "contract_hash": "0" * 64, "about": "population",
    }  # fmt: skip
    return Verdict(cell=Cell(contract, clause, slice, train, inference), status=status, at=at, **numbers | changes)
