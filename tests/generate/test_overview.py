"""The Overview dashboard: valid, complete, explained, and only about what the registry knows."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from kc_otel.contract import Contract
from kc_otel.contract.registry import ATTRIBUTES, METRICS
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.grafana import grafana_files
from kc_otel.generate.grafana.panels import grafana_unit
from kc_otel.generate.ladder import rungs
from kc_otel.generate.links import OVERVIEW_UID, panel_id
from kc_otel.generate.names import label_name, prometheus_name

METRIC_NAMES = {prometheus_name(metric) for metric in METRICS.values()}
LABELS = {label_name(name) for name in ATTRIBUTES}


def panels(board: dict) -> Iterator[dict]:
    """Every panel, those in collapsed rows too."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions(board: dict) -> Iterator[str]:
    """Every query of the dashboard and of its variables."""
    for panel in panels(board):
        yield from (target["expr"] for target in panel.get("targets", []))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def read_schema(folder: Path, kind: str) -> dict:
    """A JSON Schema of Grafana's. It writes "any value" as an object of anything, which is put right here."""

    def any_value(node: object) -> object:
        if isinstance(node, list):
            return [any_value(item) for item in node]
        if not isinstance(node, dict):
            return node
        if {key: node[key] for key in node if key != "description"} == {"type": "object", "additionalProperties": {}}:
            return {}
        return {key: any_value(value) for key, value in node.items()}

    return any_value(json.loads((folder / "grafana-jsonschema" / f"{kind}.jsonschema.json").read_text()))


@pytest.fixture(scope="module")
def board(policy: Contract) -> dict:
    """The dashboard as Grafana reads it."""
    return json.loads(grafana_files([policy])[0].text)


def test_the_dashboard_is_a_valid_classic_dashboard(board: dict, schemas: Path) -> None:
    """It satisfies Grafana's JSON Schema, which notices an error planted in it."""
    validator = jsonschema.Draft7Validator(read_schema(schemas, "dashboard"))
    assert list(validator.iter_errors(board)) == []
    broken = copy.deepcopy(board)
    broken["panels"][0]["gridPos"]["w"] = "wide"
    assert list(validator.iter_errors(broken))
    broken = copy.deepcopy(board)
    next(panel for panel in broken["panels"] if panel["type"] == "row" and panel["panels"])["panels"][0]["colour"] = 1
    assert list(validator.iter_errors(broken))


def test_each_panel_satisfies_the_schema_of_its_kind(board: dict, schemas: Path) -> None:
    """Options, field configuration and queries are checked too, which the dashboard's own schema leaves open."""

    def errors(kind: str, definition: str, value: object) -> list[str]:
        validator = jsonschema.Draft7Validator({**read_schema(schemas, kind), "$ref": f"#/definitions/{definition}"})
        return [f"{kind} {definition}: {error.message}" for error in validator.iter_errors(value)]

    for panel in panels(board):
        if panel["type"] == "row":
            continue
        kind = panel["type"].replace("-", "")
        found = errors(kind, "Options", panel["options"])
        if custom := panel["fieldConfig"]["defaults"].get("custom"):
            found += errors(kind, "FieldConfig", custom)
        for target in panel["targets"]:
            found += errors("prometheus", "Dataquery", target)
        assert found == [], panel["title"]
    assert errors("timeseries", "Options", {"legend": 1})


def test_every_panel_is_explained_measured_and_addressable(board: dict) -> None:
    """Ids are set and unique; each panel has a description and the variable's data source, each graph a unit."""
    ids = [panel["id"] for panel in panels(board)]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if panel["type"] in {"timeseries", "stat"}:
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_panels_do_not_overlap(board: dict) -> None:
    """No two panels of a level share a place on the grid of 24 columns."""
    for level in (board["panels"], *(row["panels"] for row in board["panels"] if row.get("panels"))):
        taken: set[tuple[int, int]] = set()
        for place in (panel["gridPos"] for panel in level):
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken
            assert place["x"] + place["w"] <= 24
            taken |= cells


def test_every_name_in_a_query_is_in_the_registry(board: dict) -> None:
    """Metrics, labels and the labels of legends: nothing is queried that nobody sends."""
    legends = [target.get("legendFormat", "") for panel in panels(board) for target in panel.get("targets", [])]
    for text in (*expressions(board), *legends):
        names = set(re.findall(r"\bkc_[a-z0-9_]+", text))
        assert names <= METRIC_NAMES | LABELS, text
    assert {name for text in expressions(board) for name in re.findall(r"\bkc_\w+(?=\{)", text)} <= METRIC_NAMES


def test_every_metric_of_the_evaluator_is_shown(board: dict) -> None:
    """What the registry lists beside the drift quantities can be seen somewhere."""
    shown = {name for text in expressions(board) for name in re.findall(r"\bkc_[a-z0-9_]+", text)}
    assert shown >= METRIC_NAMES


def test_verdicts_have_names_and_colours(board: dict) -> None:
    """0 PASS, 1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL, wherever a verdict is shown."""
    expected = {str(status.code): str(status) for status in Status}
    mapped = []
    for panel in panels(board):
        mapped += panel.get("fieldConfig", {}).get("defaults", {}).get("mappings", [])
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            mapped += [value for one in override["properties"] if one["id"] == "mappings" for value in one["value"]]
    texts = [{value: result["text"] for value, result in mapping["options"].items()} for mapping in mapped]
    assert texts.count(expected) == 2


def test_each_clause_has_a_panel_with_its_band_and_limit(board: dict, policy: Contract) -> None:
    """The estimate, a band between the bounds for every slice, the limit, and a threshold at the clause's own."""
    by_id = {panel["id"]: panel for panel in panels(board)}
    for clause in policy.clauses:
        panel = by_id[panel_id(policy.name, clause.id)]
        assert len(panel["targets"]) == 4
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[-1] == {"value": clause.limit_for("all"), "color": "red"}
        assert panel["fieldConfig"]["defaults"]["unit"] == grafana_unit(clause.limit_unit)
        bands = {
            override["matcher"]["options"]: one["value"]
            for override in panel["fieldConfig"]["overrides"]
            for one in override["properties"]
            if one["id"] == "custom.fillBelowTo"
        }
        assert bands == {f"{slice} upper": f"{slice} lower" for slice in ("all", *policy.slices, "other")}


def test_alerts_can_link_to_a_panel_that_exists(board: dict, policy: Contract) -> None:
    """Each rung's panel is on the board, and the board has the uid that alerts name."""
    ids = {panel["id"] for panel in panels(board)}
    assert {panel_id(policy.name, rung.clause_id) for rung in rungs(policy)} <= ids
    assert board["uid"] == OVERVIEW_UID


def test_units_that_grafana_does_not_know_are_written_out() -> None:
    """Annotations lose their braces; plain ratios stay plain numbers."""
    assert [grafana_unit(unit) for unit in ("1", "s", "{nat}")] == ["none", "s", "suffix: nat"]


def test_the_same_contracts_give_the_same_bytes(policy: Contract) -> None:
    """Twice the same, whatever the order; generating leaves no trace in the SDK."""
    other = policy.model_copy(update={"metadata": policy.metadata.model_copy(update={"name": "other"})})
    assert grafana_files([policy, other]) == grafana_files([other, policy])
