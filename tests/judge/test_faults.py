"""What the evaluator fails to judge stays alone: the rest is judged, and the failure is shown and never a PASS."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kc_otel.judge import cell_columns
from kc_otel.judge.cell_columns import CellColumns
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Evaluation, Status

CODE_SIZE = 399
DRIFT = np.random.default_rng(3).beta(1, 50, 400)


def two(contract: Any, sender: Any, now: float, **parts: Any) -> Evaluator:
    """Two contracts whose `all` and `code` drift."""
    evaluator = Evaluator(
        [contract(**parts), contract(**parts, metadata={"name": "other", "version": 1, "owner": "o"})]
    )
    for name in evaluator.states:
        for slice in ("all", "code"):
            source = sender(contract=name, slice=slice)
            evaluator.ingest_metrics(source.request(now + 1), now + 1)
            size = CODE_SIZE if (name, slice) == ("policy", "code") else DRIFT.size
            evaluator.ingest_metrics(source.request(now + 2, DRIFT[:size]), now + 2)
    return evaluator


def statuses(found: dict[str, Evaluation]) -> dict[str, list[Status]]:
    return {name: [verdict.status for verdict in evaluation.verdicts] for name, evaluation in found.items()}


def raising(real: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """A function that overflows for some of its arguments."""

    def maybe(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise OverflowError("intermediate overflow in fsum")
        return real(*args, **options)

    return maybe


def test_a_cell_that_cannot_be_judged_is_no_data_and_its_neighbours_are_judged(
    contract: Any, sender: Any, now: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other slice and the other contract FAIL as they did; the reason names the fault, the log has it once."""
    evaluator = two(contract, sender, now)
    overflowing = {CODE_SIZE}
    fails = raising(cell_columns.intervals_of_rows, lambda _, __, rows: not overflowing.isdisjoint(rows.total))
    monkeypatch.setattr(cell_columns, "intervals_of_rows", fails)
    for step in range(3):
        found = evaluator.evaluate(now + 3 + step)
    assert statuses(found) == {"policy": [Status.FAIL, Status.NO_DATA], "other": [Status.FAIL, Status.FAIL]}
    reason = found["policy"].verdicts[1].reason
    assert reason.startswith("not judged: the evaluator failed (OverflowError: intermediate overflow in fsum)")
    assert evaluator.faults.counts == {"policy": 3}
    assert "clause token-tv on slice code of aaaaaaaaaaaa -> bbbbbbbbbbbb" in evaluator.faults.present["policy"]
    (record,) = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert record.exc_info is not None
    overflowing.clear()
    assert statuses(evaluator.evaluate(now + 7))["policy"] == [Status.FAIL, Status.FAIL]
    assert evaluator.faults.present == {}
    assert caplog.text.count("contract policy: judging works again") == 1


def test_a_contract_that_cannot_be_judged_keeps_its_cells_as_no_data(contract, sender, now, monkeypatch):
    """No cell is gone, which would resolve its alerts; the other contract is judged."""
    evaluator = two(contract, sender, now)
    before = evaluator.evaluate(now + 3)
    monkeypatch.setattr(
        CellColumns, "judge", raising(CellColumns.judge, lambda cells, *_: cells is evaluator._cells_of["policy"])
    )
    after = evaluator.evaluate(now + 4)
    assert statuses(after) == {"policy": [Status.NO_DATA] * 2, "other": [Status.FAIL] * 2}
    assert [verdict.cell for verdict in after["policy"].verdicts] == [
        verdict.cell for verdict in before["policy"].verdicts
    ]
    assert evaluator.faults.counts == {"policy": 1}


def test_a_contract_that_was_never_judged_has_the_cells_that_are_remembered(contract, sender, now, monkeypatch):
    """After a restart the cells of kernels that had reported are there, for their alerts fire still."""
    evaluator = two(contract, sender, now)
    monkeypatch.setattr(ContractState, "evict", raising(ContractState.evict, lambda *_: True))
    (verdict, *_) = evaluator.evaluate(now + 4)["policy"].verdicts
    assert verdict.status is Status.NO_DATA
    assert (verdict.cell.kernel_train, verdict.cell.kernel_inference) == ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
