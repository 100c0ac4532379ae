"""The last decision table in a file."""

import logging
from dataclasses import replace

import pytest

from kc_otel.client.router import Router, TableFile
from kc_otel.judge.decisions import Canary, DecisionTable, Directive, DirectiveKind, Pin, Promoted, changed


def test_what_was_saved_is_loaded_and_nothing_else_is_left(tmp_path):
    kept = TableFile(tmp_path / "table.json")
    assert kept.load() is None
    kept.save(DecisionTable(3))
    table = changed(DecisionTable(7), 1.0, canaries=[Canary("c", "v", 0.5, "why", 1.0)])
    kept.save(table)
    assert kept.load() == table
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def answered(router, table):
    """The evaluator has answered a request with a table, and judges each contract that the request named."""
    router._report()
    router._arrived(table)
    router._heard(())


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff", b'{"version": "x"}'])
def test_a_file_that_holds_something_else_is_refused_by_name(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.json: not a decision table"):
        Router("http://127.0.0.1:9", keep=path)


def test_the_last_promotion_is_kept_without_being_asked_to(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    table = DecisionTable(
        3,
        pins=(Pin("c", "code", "train-kernel", "ada", "why", 1.0),),
        canaries=(Canary("c", "new", 1.0, "canary", 1.0),),
        promoted=(Promoted("c", "old", 1.0),),
    )
    url = "http://127.0.0.1:9"
    with Router(url) as router:
        assert router.choose_version("c", [], ["new", "old"]) is None
        answered(router, table)
        assert router.choose_version("c", [], ["new", "old"]) == "new"
    with Router(url) as router:
        assert router.choose_version("c", [], ["new", "old"]) == "old"
        assert router.choose_version("c", ["code"], ["new", "old"]) is None
    (kept,) = (tmp_path / "kc-otel").iterdir()
    with Router(url, token_file=tmp_path / "another") as router:
        assert router.choose("c", [], "old") == "train-kernel"
    with Router(url, keep=False) as router:
        assert router.choose("c", [], "old") == "train-kernel"
    kept.write_text("{")
    with caplog.at_level(logging.WARNING), Router(url) as router:
        assert router.choose("c", [], "old") == "train-kernel"
    assert "no decision table from the process before" in caplog.text


def test_a_run_does_not_obey_the_directives_of_the_one_before(tmp_path):
    """The evaluator may not be there; routes and pins keep what they know from users, a halt would only end the run."""
    path, table = tmp_path / "table.json", DecisionTable(
        3,
        pins=(Pin("c", "code", "train-kernel", "ada", "why", 1.0),),
        directives=(Directive("c", DirectiveKind.HALT, "code", "token-tv", 1.0, "f"),),
    )  # fmt: skip
    TableFile(path).save(table)
    with Router("http://127.0.0.1:9", keep=path, trusted=["v"]) as router:
        assert (router.halted("c"), router.choose("c", ["code"], "v")) == (None, "train-kernel")
        router._arrived(table)
        assert str(router.halted("c")).startswith("token-tv, of the inference kernel since 1970-01-01 00:00:01 UTC;")


def test_a_disk_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    kept = TableFile(tmp_path / "missing" / "table.json")
    with caplog.at_level(logging.WARNING):
        kept.save(DecisionTable(1))
        kept.save(DecisionTable(2))
    assert caplog.text.count("cannot be kept in") == 1


def test_an_evaluator_that_lost_its_state_lets_nothing_serve_that_was_rolled_back(tmp_path, caplog):
    """Neither with its empty table nor with the next, nor in a process that starts then, until it names the version."""
    back = DecisionTable(9, 1.0, canaries=(Canary("c", "new", 0.0, "rolled back", 1.0),))
    fresh = DecisionTable(1, 2.0, canaries=(Canary("c", "other", 0.5, "canary", 2.0),))
    path = tmp_path / "table.json"
    with caplog.at_level(logging.WARNING), Router("http://127.0.0.1:9", keep=path) as router:
        router.choose("c", [])
        for table in (back, *(replace(fresh, version=version, at=2.0 + version) for version in (1, 2, 2, 8, 9, 10, 7))):
            answered(router, table)
            assert router.choose_version("c", [], ["new", "old"]) == "old"
        assert caplog.text.count("decisions began anew") == 1
    with Router("http://127.0.0.1:9", keep=path) as router:
        router.choose("c", [])
        answered(router, DecisionTable(3, 4.0))
        answered(router, DecisionTable(11, 4.0))
        assert router.choose("c", [], "new") == "train-kernel"
        answered(router, DecisionTable(12, 5.0, canaries=(Canary("c", "new", 1.0, "full", 5.0),)))
        assert router.choose("c", [], "new") == "inference-kernel"
