"""What the network sends is shown as what it is: in logs and in terminals, and no name is made of it."""

import json
import logging
import math

import httpx
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from kc_otel.cli.terminal import refuse
from kc_otel.contract.plain_text import plain
from kc_otel.judge.evaluator import Evaluator
from kc_otel.serve.log_format import JsonFormatter, PlainFormatter
from tests.judge.conftest import Sender, make_contract

HOSTILE = {
    "newline": "a\n12:00:00 I all is well",
    "return": "a\rall is well",
    "escape": "a\x1b[2J\x1b[31mb",
    "c1": "a\x9b2Jb",
    "bell": "a\x07b",
    "bidi": "a\u202etxt.exe",
    "isolate": "a\u2066b",
    "line separator": "a\u2028b",
    "surrogate": "a\ud800b",
}
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def harmless(said: str, lines: int = 1) -> bool:
    """So many lines, and in them nothing but what ASCII and the text's own letters print."""
    return said.count("\n") == lines and all(line.isprintable() for line in said.split("\n"))


def written(text, error=None):
    """What the evaluator's log has of a message, and of an error, that another formatter has seen before."""
    traceback = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("kc_otel", logging.ERROR, "a.py", 1, "kernel %s", (text,), traceback)
    logging.Formatter().format(record)
    return PlainFormatter("%(asctime)s %(message)s").format(record)


@hostile
def test_a_message_of_the_log_is_one_line(text):
    """An attacker writes no second line into it, and clears no operator's screen."""
    assert harmless(written(text), 0)
    lines = written(text, ValueError(text)).split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) > 1
    assert all(line.startswith("    ") for line in lines[1:])


@hostile
def test_a_message_of_the_log_is_one_object(text):
    """As JSON too: one line of ASCII, and nothing in its texts that drives a terminal once it is decoded."""
    record = logging.LogRecord("kc_otel", logging.ERROR, "a.py", 1, "kernel %s", (text,), None)
    error = ValueError(text)
    record.exc_info = (type(error), error, None)
    record.attributes = {"kc.slice": text, "kc.bound.lower": math.nan, "kc.bound.samples": 7}
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    said = json.loads(line)
    assert (said["level"], said["logger"], said["attributes"]["kc.bound.samples"]) == ("ERROR", "kc_otel", 7)
    assert said["attributes"]["kc.bound.lower"] == "nan"
    texts = [said["message"], said["attributes"]["kc.slice"], *said["exception"].split("\n")]
    assert all(shown.isprintable() for shown in texts)


def commanded(monkeypatch, command, code, answer):
    """What a command prints, and exits with, where its evaluator answers so."""
    content = json.dumps(answer)
    monkeypatch.setattr(
        httpx, "request",
        lambda method, url, **_: httpx.Response(code, content=content, request=httpx.Request(method, url)),
    )  # fmt: skip
    app = typer.Typer()
    register(app, "events", "alerts", "route")
    return CliRunner().invoke(app, command.split())


@hostile
@pytest.mark.parametrize("command", ["events", "alerts list"])
def test_a_terminal_shows_what_an_evaluator_answers(text, command, monkeypatch):
    """Also one that is not ours: its answers drive no terminal."""
    answer = {
        "events": [{"at": 0.0, "kind": text, "contract": text, "message": text}],
        "alerts": [],
        "silences": [dict.fromkeys(("id", "clause", "slice", "contract", "by", "why"), text) | {"until": 0.0}],
        "incidents": [{"went_away": True, "contract": text, "headline": text, "state_text": text}],
        "outbox": [{"endpoint": text, "disabled": text, "disabled_at": 0.0, "waiting": 1}],
        "evaluated_at": 0.0,
        "failures": {text: text},
        "now": 75.0,
    }
    done = commanded(monkeypatch, command, 200, answer)
    assert done.exit_code == (3 if command == "alerts list" else 0)
    assert harmless(done.output, 4 if command == "alerts list" else 1)


@hostile
def test_a_refusal_shows_what_it_was_told(text, monkeypatch, capsys):
    assert harmless(commanded(monkeypatch, "events", 500, {"detail": text}).output)
    with pytest.raises(typer.Exit):
        refuse(f"first\n{text.replace(chr(10), ' ')}")
    assert harmless(capsys.readouterr().err, 2)


@hostile
@pytest.mark.parametrize(
    "attribute", ["kc.kernel.inference", "kc.kernel.train", "kc.slice", "kc.contract", "kc.made.up"]
)
def test_a_name_that_cannot_stand_on_a_line_is_refused(text, attribute):
    """It would be in every verdict, event, metric and webhook; the refusal does not repeat it as it is."""
    evaluator, source = Evaluator([make_contract()]), Sender()
    source.attributes[attribute] = text.replace("\ud800", "\x00")  # protobuf itself takes no surrogates
    outcome = evaluator.ingest_metrics(source.request(1_800_000_000.0, [0.5]), 1_800_000_000.0)
    assert outcome.rejected == 1
    assert outcome.message.isprintable()
    assert evaluator.series_count == 0


@hostile
def test_what_is_plain_stays_and_the_rest_can_be_read(text):
    assert plain("\u00fcber \u03b1 \u5185\u6838") == "\u00fcber \u03b1 \u5185\u6838"
    assert plain(text).isprintable()
    assert plain(text).startswith("a\\") or "\\" in plain(text)
