"""The Overview dashboard: what is broken, since when, for whom, and what was done about it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from kc_otel.contract.policy import Action
from kc_otel.generate.grafana.panels import STATUS_COLOURS
from kc_otel.generate.grafana.queries import ACTION_BITS
from kc_otel.judge.verdict import Status

REPOSITORY = Path(__file__).parents[2]
WORST, EVERY = 7, 11


@pytest.fixture(scope="module")
def board(boards: dict) -> dict:
    """The dashboard as Grafana reads it."""
    return boards["overview"]


def panels(board: dict) -> Iterator[dict]:
    """Every panel, those in collapsed rows too."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def column(table: dict, title: str) -> dict:
    """What the table does with a column, by property."""
    (found,) = (override for override in table["fieldConfig"]["overrides"] if override["matcher"]["options"] == title)
    return {entry["id"]: entry["value"] for entry in found["properties"]}


def table(board: dict, id: int) -> dict:
    """The table of an id."""
    return next(panel for panel in panels(board) if panel["id"] == id)


def test_the_answer_is_on_the_first_screen(board: dict) -> None:
    first = [panel["title"] for panel in board["panels"] if panel["gridPos"]["y"] + panel["gridPos"]["h"] <= 14]
    assert first[:5] == ["Evaluated", "Broken", "No data", "Undecided", "Holding"]
    assert first[-1] == "What does not hold: since when, for whom, and what was done about it"


def test_the_first_table_answers_its_four_questions_from_the_left(board: dict) -> None:
    worst = table(board, WORST)
    (organize,) = (step["options"] for step in worst["transformations"] if step["id"] == "organize")
    names = sorted(organize["indexByName"], key=organize["indexByName"].__getitem__)
    titles = [organize["renameByName"][name] for name in names]
    assert titles[:8] == ["State", "Contract", "Clause", "Slice", "Promise", "Since", "Actions", "Alert"]
    assert [(key["displayName"], key["desc"]) for key in worst["options"]["sortBy"]] == [
        ("State", True),
        ("Margin", False),
    ]
    assert (
        worst["fieldConfig"]["defaults"]["noValue"]
        == "Every judged promise holds, if the first tile shows a running evaluator"
    )


def test_verdicts_have_names_and_colours_in_both_tables(board: dict) -> None:
    page = (REPOSITORY / "kc_otel" / "charts" / "charts.css").read_text()
    tones = dict(re.findall(r"--(fail|silent|open|pass): (#[0-9a-f]{6});", page.partition("@media")[0]))
    assert list(STATUS_COLOURS.values()) == [tones[name] for name in ("pass", "open", "silent", "fail", "silent")]
    script = (REPOSITORY / "kc_otel" / "serve" / "page" / "format.js").read_text()
    shapes = dict(re.findall(r'^  ([A-Z_]+): \{.* shape: "(.)"', script, re.MULTILINE))
    for id in (WORST, EVERY):
        (mapping,) = column(table(board, id), "State")["mappings"]
        texts = {value: result["text"] for value, result in mapping["options"].items()}
        assert texts == {str(status.code): f"{shapes[status]} {status}" for status in Status}


def test_every_combination_of_actions_has_words(board: dict) -> None:
    (mapping,) = column(table(board, WORST), "Actions")["mappings"]
    assert set(mapping["options"]) == {str(code) for code in range(2 ** len(ACTION_BITS))}
    kinds = get_args(Action.model_fields["kind"].annotation)
    assert all(
        any(re.fullmatch(pattern, f"{kind}:x") or re.fullmatch(pattern, kind) for _, pattern, _ in ACTION_BITS)
        for kind in kinds
    )
    assert mapping["options"]["0"]["text"] == "nothing yet"
    assert mapping["options"]["33"]["text"] == "sent to training kernel, people told"
    assert mapping["options"]["72"]["text"] == "training halted, promotion held"


def test_cells_lead_to_their_slice(board: dict) -> None:
    worst = table(board, WORST)
    for title in ("State", "Clause", "Slice"):
        (link,) = column(worst, title)["links"]
        for variable in ("contract", "clause", "slice"):
            assert f"var-{variable}=${{__data.fields.{variable.capitalize()}}}" in link["url"]
