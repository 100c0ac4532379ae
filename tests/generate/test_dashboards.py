"""All dashboards: valid, complete, explained, linked, and only about what the registry knows."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args
from urllib.parse import parse_qs, urlsplit

import jsonschema
import pytest

from kc_otel.contract.load import load_all
from kc_otel.contract.policy import Action
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS, label, prometheus_name
from kc_otel.generate.files import RL_UID
from kc_otel.generate.grafana import grafana_files, queries, sdk
from kc_otel.generate.grafana.boards import board_file
from kc_otel.generate.grafana.panels import STATUS_COLOURS, graph
from kc_otel.generate.grafana.queries import ACTION_BITS
from kc_otel.judge.verdict import Status

NAMES = ("overview", "slice", "rl", "promotion", "health")
METRIC_NAMES = {prometheus_name(metric) for metric in METRICS.values()}
HISTOGRAM_NAMES = {prometheus_name(quantity) for quantity in RECORDED.values()}
LABELS = {label(name) for name in ATTRIBUTES}
WORST, EVERY = 7, 11
"""Tables of the overview."""
DATASOURCES = {("prometheus", "${datasource}"), ("tempo", "${traces}")}


def panels(board: dict) -> Iterator[dict]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions(board: dict) -> Iterator[str]:
    """Every query of the dashboard, of its variables and of its annotations."""
    for panel in panels(board):
        yield from (target["expr"] for target in panel.get("targets", []) if "expr" in target)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for annotation in board["annotations"].get("list", []):
        yield annotation["expr"]


def links(board: dict) -> Iterator[str]:
    """Every address that the dashboard leads to: links of its own, of panels, of values, and in text."""
    yield from (link["url"] for link in board.get("links", []))
    for panel in panels(board):
        yield from (link["url"] for link in panel.get("links", []))
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        yield from (link["url"] for link in defaults.get("links", []))
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            for entry in override["properties"]:
                yield from (link["url"] for link in entry["value"]) if entry["id"] == "links" else ()
        yield from re.findall(r"\]\((/d/[^)]+)\)", panel.get("options", {}).get("content", ""))


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


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_valid_classic_dashboard(boards, name, schemas):
    validator = jsonschema.Draft7Validator(read_schema(schemas, "dashboard"))
    assert [error.message for error in validator.iter_errors(boards[name])] == []
    broken = copy.deepcopy(boards[name])
    broken["panels"][0]["gridPos"]["w"] = "wide"
    assert list(validator.iter_errors(broken))


@pytest.mark.parametrize("name", NAMES)
def test_each_panel_satisfies_the_schema_of_its_kind(boards, name, schemas):
    """Options, field configuration and queries are checked too, which the dashboard's own schema leaves open."""

    def errors(kind: str, definition: str, value: object) -> list[str]:
        validator = jsonschema.Draft7Validator({**read_schema(schemas, kind), "$ref": f"#/definitions/{definition}"})
        return [f"{kind} {definition}: {error.message}" for error in validator.iter_errors(value)]

    for panel in panels(boards[name]):
        if panel["type"] == "row":
            continue
        kind = panel["type"].replace("-", "")
        found = errors(kind, "Options", panel["options"])
        if custom := panel.get("fieldConfig", {}).get("defaults", {}).get("custom"):
            found += errors(kind, "FieldConfig", custom)
        for target in panel.get("targets", []):
            found += errors("tempo" if "expr" not in target else "prometheus", "Dataquery", target)
        assert found == [], panel["title"]
    assert errors("timeseries", "Options", {"legend": 1})


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_is_explained_measured_and_addressable(boards, name):
    ids = [panel["id"] for panel in panels(boards[name])]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    for panel in panels(boards[name]):
        if panel["type"] == "row":
            continue
        if panel["type"] == "text":
            assert len(panel["options"]["content"]) > 100, panel["title"]
            continue
        assert len(panel["description"]) > 20, panel["title"]
        assert (panel["datasource"]["type"], panel["datasource"]["uid"]) in DATASOURCES
        if panel["type"] in {"timeseries", "stat"}:
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_a_query_is_in_the_registry(boards, name):
    board = boards[name]
    legends = [target.get("legendFormat", "") for panel in panels(board) for target in panel.get("targets", [])]
    marks = [annotation["textFormat"] for annotation in board["annotations"].get("list", [])]
    for text in (*expressions(board), *legends, *marks):
        names = set(re.findall(r"\bkc_[a-z0-9_]+", text))
        assert names <= METRIC_NAMES | HISTOGRAM_NAMES | LABELS, text
    selected = {name for text in expressions(board) for name in re.findall(r"\bkc_\w+(?=\{)", text)}
    assert selected <= METRIC_NAMES | HISTOGRAM_NAMES


def test_span_attributes_of_trace_queries_are_in_the_registry(boards):
    (query,) = (t["query"] for panel in panels(boards["slice"]) for t in panel.get("targets", []) if "query" in t)
    named = set(re.findall(r"span\.(kc\.[a-z_.]+)", query))
    assert named
    assert {name for name in named if "span" not in ATTRIBUTES[name].on} == set()


def test_every_metric_beside_the_drift_quantities_is_shown(boards):
    texts = [text for board in boards.values() for text in expressions(board)]
    shown = {name for text in texts for name in re.findall(r"\bkc_[a-z0-9_]+", text)}
    assert shown >= {name for name in METRIC_NAMES if not name.startswith("kc_rule")}


def test_variables_that_a_query_uses_are_there(boards):
    for name, board in boards.items():
        known = {variable["name"] for variable in board["templating"]["list"]}
        titles = [panel["title"] for panel in panels(board)]
        traces = [t["query"] for panel in panels(board) for t in panel.get("targets", []) if "query" in t]
        steps = [t.get("interval", "") for panel in panels(board) for t in panel.get("targets", [])]
        repeats = [f"${panel['repeat']}" for panel in panels(board) if "repeat" in panel]
        for text in (*expressions(board), *titles, *traces, *steps, *repeats):
            assert set(re.findall(r"\$\{?([a-z][a-z_]*)", text)) <= known, (name, text)


def test_links_lead_to_dashboards_and_variables_that_exist(boards):
    by_uid = {board["uid"]: board for board in boards.values()}
    assert len(by_uid) == len(NAMES)
    for board in boards.values():
        others = {link["url"].removeprefix("/d/") for link in board["links"]}
        assert others == set(by_uid) - {board["uid"]}
        for url in links(board):
            target = by_uid[urlsplit(url).path.removeprefix("/d/")]
            for key, (value, *_) in parse_qs(urlsplit(url).query).items():
                assert value
                variables = {variable["name"] for variable in target["templating"]["list"]}
                assert key.removeprefix("var-") in variables


def test_dashboards_say_nothing_of_a_contract(boards, repository, policy):
    contracts = (policy, *load_all([repository / "contracts"]))
    names = {contract.name for contract in contracts}
    names |= {clause.id for contract in contracts for clause in contract.clauses} - {"clip-share"}
    names |= {slice for contract in contracts for slice in contract.slices}
    for board in boards.values():
        text = " ".join((*expressions(board), *links(board)))
        assert {name for name in names if re.search(rf'["=|]{re.escape(name)}["&|]', text)} == set()
    assert grafana_files([])[: len(NAMES)] == grafana_files([policy])[: len(NAMES)]


def test_the_repeated_panel_is_of_a_variable_of_many_values(boards):
    """Margins by contract: Grafana copies a panel for every value that is picked."""
    repeated = [(name, panel) for name, board in boards.items() for panel in panels(board) if "repeat" in panel]
    ((name, panel),) = repeated
    many = {entry["name"] for entry in boards[name]["templating"]["list"] if entry["multi"] and entry["includeAll"]}
    assert (name, panel["repeat"]) == ("overview", "contract")
    assert "contract" in many
    assert all("$contract" in text for text in (panel["title"], panel["targets"][0]["expr"]))


def test_numbers_of_a_clause_are_in_its_unit(boards):
    """Panels with bounds take their unit from a query, which Grafana leaves out of what is drawn."""
    for panel in panels(boards["slice"]):
        texts = [target.get("expr", "") for target in panel.get("targets", [])]
        if not any(re.search(r"kc_bound_(estimate|limit)", text) for text in texts):
            continue
        if panel["type"] == "timeseries" or panel["title"] in {"Estimate", "Limit"}:
            (config,) = (step["options"] for step in panel["transformations"] if step["id"] == "configFromData")
            (target,) = (candidate for candidate in panel["targets"] if candidate["refId"] == config["configRefId"])
            assert (target["format"], target["instant"]) == ("table", True)
            (mapped,) = config["mappings"]
            assert mapped == {"fieldName": "kc_clause_unit", "handlerKey": "unit"}
            assert target["expr"].startswith("label_replace(")


def column(table: dict, title: str) -> dict:
    (found,) = (override for override in table["fieldConfig"]["overrides"] if override["matcher"]["options"] == title)
    return {entry["id"]: entry["value"] for entry in found["properties"]}


def table(board: dict, id: int) -> dict:
    return next(panel for panel in panels(board) if panel["id"] == id)


def test_verdicts_have_names_and_colours_in_both_tables(boards, repository):
    page = (repository / "kc_otel" / "serve" / "page" / "palette.css").read_text()
    tones = dict(re.findall(r"--(fail|silent|open|pass): (#[0-9a-f]{6});", page.partition("@media")[0]))
    assert list(STATUS_COLOURS.values()) == [tones[name] for name in ("pass", "open", "silent", "fail", "silent")]
    script = (repository / "kc_otel" / "serve" / "page" / "format.js").read_text()
    shapes = dict(re.findall(r'^  ([A-Z_]+): \{.* shape: "(.)"', script, re.MULTILINE))
    for id in (WORST, EVERY):
        (mapping,) = column(table(boards["overview"], id), "State")["mappings"]
        texts = {value: result["text"] for value, result in mapping["options"].items()}
        assert texts == {str(status.code): f"{shapes[status]} {status}" for status in Status}


@pytest.mark.parametrize("name", NAMES)
def test_a_margin_below_zero_is_no_breach_by_its_colour(boards, name):
    """An undecided cell's is negative, too; the verdict beside it says which."""
    for panel in panels(boards[name]):
        config = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
        named = {of["matcher"]["options"]: of["properties"] for of in config["overrides"]}
        shown = [
            of["value"] for title, own in named.items() if "argin" in title for of in own if of["id"] == "thresholds"
        ]
        shown += [config["defaults"].get("thresholds", {"steps": []})] if "argin" in panel["title"] else []
        assert not [step for of in shown for step in of["steps"] if step["color"] == "red"], panel["title"]


def test_every_combination_of_actions_has_words(boards):
    (mapping,) = column(table(boards["overview"], WORST), "Actions")["mappings"]
    assert set(mapping["options"]) == {str(code) for code in range(2 ** len(ACTION_BITS))}
    kinds = get_args(Action.model_fields["kind"].annotation)
    assert all(
        any(re.fullmatch(pattern, f"{kind}:x") or re.fullmatch(pattern, kind) for pattern, _ in ACTION_BITS)
        for kind in kinds
    )
    assert mapping["options"]["0"]["text"] == "nothing yet"
    assert mapping["options"]["33"]["text"] == "route to training kernel, message"
    assert mapping["options"]["72"]["text"] == "halt, hold of promotion"


def test_cells_lead_to_their_slice(boards):
    worst = table(boards["overview"], WORST)
    for title in ("State", "Clause", "Slice"):
        (link,) = column(worst, title)["links"]
        for variable in ("contract", "clause", "slice"):
            assert f"var-{variable}=${{__data.fields.{variable.capitalize()}}}" in link["url"]


def test_an_unknown_quantity_is_named_with_its_panel():
    def contents():
        for id, quantity in enumerate(("k3", "k4")):
            query = sdk.prometheus.Dataquery().expr(queries.mean(quantity))
            yield graph(id, f"Mean of {quantity}", "", [query], "none")

    with pytest.raises(ValueError, match="board kc-rl, panel: the one after 'Mean of k3': 'k4' is not in the registry"):
        board_file(RL_UID, "", (), contents())
