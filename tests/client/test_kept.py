"""The last decision table in a file."""

from __future__ import annotations

import logging

import pytest

from kc_otel.client.router import Router, TableFile
from kc_otel.judge.decisions.entries import Canary
from kc_otel.judge.decisions.table import DecisionTable, set_canary


def test_what_was_saved_is_loaded_and_nothing_else_is_left(tmp_path):
    """The newest table, in one file."""
    kept = TableFile(tmp_path / "table.json")
    assert kept.load() is None
    kept.save(DecisionTable(3))
    table = set_canary(DecisionTable(7), Canary("c", "all", "v", 0.5, "why", 1.0))
    kept.save(table)
    assert kept.load() == table
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff", b'{"version": "x"}'])
def test_a_file_that_holds_something_else_is_refused_by_name(tmp_path, content):
    """At the start of the router, before a request is served on a guess."""
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.json: not a decision table"):
        Router("http://127.0.0.1:9", keep=path)


def test_a_disk_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    """Routing goes on without it."""
    kept = TableFile(tmp_path / "missing" / "table.json")
    with caplog.at_level(logging.WARNING):
        kept.save(DecisionTable(1))
        kept.save(DecisionTable(2))
    assert caplog.text.count("cannot be kept in") == 1
