"""Every query of every dashboard on a real Prometheus answers what a float64 computation says.

Real recorders and two real evaluators were played over five minutes; what they exported is in the store. What is
expected is made of what recorders were given and of what evaluators hold in memory (`tests/tools/panel_table.py`).
"""

import json
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kc_otel.contract import Contract
from kc_otel.generate.grafana import grafana_files
from kc_otel.generate.links import RL_UID, SLICE_UID, panel_id
from tests.tools.panel_answers import agrees
from tests.tools.panel_cells import Expected, judged_pairs
from tests.tools.panel_counters import reported_kernels
from tests.tools.panel_rows import World
from tests.tools.panel_samples import parsed
from tests.tools.panel_store import SCRAPED_AS, Store, filled, rate_interval
from tests.tools.panel_table import table
from tests.tools.panel_traffic import STEP

pytestmark = pytest.mark.slow

BOARDS = ("overview", "slice", "rl", "promotion", "health")
CASES = (
    *((name, case) for name in BOARDS for case in ("at first", "what is broken")),
    *((name, case) for name in BOARDS[:-1] for case in ("a training kernel", "an inference kernel")),
    *((name, "another contract") for name in BOARDS if name != "slice"),
    ("slice", "an operator"),
    *((name, "a minute before") for name in BOARDS if name != "slice"),
)
"""Dashboards, and what is picked on them; rules had recorded nothing a minute before."""


@pytest.fixture(scope="module")
def boards(panel_contracts: tuple[Contract, ...]) -> dict[str, dict]:
    """Every dashboard of both contracts as Grafana reads it."""
    files = [file for file in grafana_files(panel_contracts) if file.path.suffix == ".json"]
    return {file.path.stem: json.loads(file.text) for file in files}


def picks(board: dict, case: str, world: World) -> dict[str, str]:
    """What is picked on a dashboard by each of its variables, as it is put into queries."""
    train, inference = (kernel.fingerprint for kernel in world.recorded.kernels["fp8"])
    found = dict.fromkeys(("contract", "slice", "kernel_train", "kernel_inference", "operator"), ".*")
    if board["uid"] in {RL_UID, SLICE_UID}:
        found["slice"] = "all"
    if board["uid"] == SLICE_UID:
        found |= {"contract": world.contract.name, "clause": "token-tv", "quantity": "kc_drift_tv_token"}
    if case == "what is broken":
        found |= {"contract": world.contract.name, "slice": "code", "kernel_train": train}
        found |= {"kernel_inference": inference, "clause": "reward", "quantity": "kc_drift_tv_seq"}
    if case == "an inference kernel":
        found["kernel_inference"] = world.recorded.kernels["bf16"][1].fingerprint
    if case == "a training kernel":
        found["kernel_train"] = world.recorded.kernels["int4"][0].fingerprint
    if case == "another contract":
        found["contract"] = world.contracts[1].name
    if case == "an operator":
        found |= {"clause": "attention", "quantity": "kc_drift_operator_relative", "operator": "attention"}
    variables = {one["name"] for one in board["templating"]["list"]}
    return {name: value for name, value in found.items() if name in variables}


def queries(board: dict) -> Iterator[tuple[str, int, dict]]:
    """(Panel, place, target) of every query that Prometheus answers; panels of clauses are known by their id alone."""
    for panel in (inner for outer in board["panels"] for inner in (outer, *outer.get("panels", []))):
        name = f"{panel['id']} {panel['title']}" if panel["id"] < 1000 else str(panel["id"])
        for place, target in enumerate(one for one in panel.get("targets", []) if "expr" in one):
            yield name, place, target


def may_be_empty(contracts: tuple[Contract, ...]) -> dict[tuple[str, str], str]:
    """Why a query may find nothing at first, by panel and query."""
    own, other = contracts
    silent = [(own, clause, "no recorder sends it") for clause in ("logit-drift", "ttft")]
    silent += [(other, clause.id, "nobody reports for this contract") for clause in other.clauses]
    found = {(str(panel_id(of.name, clause)), ref): why for of, clause, why in silent for ref in "ABC"}
    return found | {(str(panel_id(other.name, "input")), "A"): "nobody reports for this contract"}


def differences(store: Store, world: World, expression: str, expected: Expected) -> Iterator[tuple]:
    """What is wrong with the answer to a query."""
    answers = {frozenset(row["metric"].items()): row for row in store.ask(expression, world)}
    wanted = expected(world)
    for key in answers.keys() ^ wanted.keys():
        yield "missing" if key in wanted else "not expected", dict(key)
    for key in answers.keys() & wanted.keys():
        if not agrees(answers[key], wanted[key]):
            yield dict(key), answers[key].get("value"), wanted[key]


def test_the_table_is_of_every_query_and_of_no_other(boards: dict, panel_contracts: tuple[Contract, ...]) -> None:
    """A new query needs an expectation, and an expectation is of a query."""
    found: dict[str, dict[str, int]] = {}
    for name, board in boards.items():
        panels = found.setdefault(name, {})
        for panel, place, _ in queries(board):
            panels[panel] = place + 1
    assert found == {
        name: {panel: len(each) for panel, each in of.items()} for name, of in table(panel_contracts).items()
    }
    assert sum(count for panels in found.values() for count in panels.values()) > 150


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_query_answers_what_float64_says(panel_store: Store, boards: dict, name: str, case: str) -> None:
    """Series by series; and at first every query finds something, but for what nobody reports."""
    board, every, silent = (
        boards[name],
        table(panel_store.world.contracts)[name],
        may_be_empty(panel_store.world.contracts),
    )
    world, wrong = panel_store.world.but(picked=picks(board, case, panel_store.world)), []
    if case == "a minute before":
        world = world.but(at=world.at - 60, range=100)
    for panel, place, target in queries(board):
        where, expected, now = (panel, target["refId"]), every[panel][place], world.but(rate=rate_interval(target))
        wrong += [(*where, *one) for one in differences(panel_store, now, target["expr"], expected)]
        if case == "at first" and bool(expected(now)) == (where in silent):
            wrong.append((*where, silent.get(where, "finds nothing")))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", ["overview", "slice", "rl", "promotion"])
def test_a_mark_is_where_a_kernel_version_appears(panel_store: Store, boards: dict, name: str) -> None:
    """Each pair that is judged and each kernel that reports is marked for five minutes, and no longer."""
    marks = {one["name"]: one["expr"] for one in boards[name]["annotations"]["list"]}
    expected = {"Kernel versions judged": judged_pairs, "Kernel versions reported": reported_kernels}
    assert marks.keys() == expected.keys()
    for case in ("at first", "what is broken", "another contract"):
        world = panel_store.world.but(picked=picks(boards[name], case, panel_store.world))
        known = world.but(at=world.recorded.end + 290)
        for title, expression in marks.items():
            assert expected[title](world) or case == "another contract"
            assert not list(differences(panel_store, world, expression, expected[title])), title
            assert not panel_store.ask(expression, known), title


def listed(store: Store, variable: dict, world: World) -> set[str]:
    """Values of a variable. `label_values` and `query_result` are calls of Grafana's, which asks as it is done here."""
    query = variable["query"]["query"]
    if matched := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
        given = {"match[]": filled(matched[1], world)}
        return set(store.client.get(f"/label/{matched[2]}/values", params=given).json()["data"])
    rows = store.ask(re.fullmatch(r"query_result\((.*)\)", query)[1], world)
    texts = [",".join(f'{key}="{value}"' for key, value in row["metric"].items()) for row in rows]
    return {re.search(variable["regex"].strip("/"), text)[1] for text in texts}


@pytest.mark.parametrize(("name", "case"), [one for one in CASES if one[1] != "a minute before"])
def test_variables_list_what_there_is(panel_store: Store, boards: dict, name: str, case: str) -> None:
    """Contracts, and of those that are picked the slices, clauses and kernel versions; what is picked is among them."""
    world = panel_store.world.but(picked=picks(boards[name], case, panel_store.world))
    chosen = [one for one in world.contracts if re.fullmatch(world.picked["contract"], one.name)]
    reported = world.recorded.kernels.values() if world.contract in chosen else ()
    train, inference = ({pair[side].fingerprint for pair in reported} for side in (0, 1))
    expected = {
        "contract": {one.name for one in world.contracts},
        "clause": {clause.id for one in chosen for clause in one.clauses},
        "slice": {slice for one in chosen for slice in ("all", *one.slices)},
        "kernel_train": train,
        "kernel_inference": inference,
        "quantity": {world.picked.get("quantity")},
        "operator": {"attention", "norm"} if case == "an operator" else set(),
    }
    found = {
        one["name"]: listed(panel_store, one, world)
        for one in boards[name]["templating"]["list"]
        if "query" in one["type"]
    }
    assert found == {name: expected[name] for name in found}
    assert all(value == ".*" or value in found[name] for name, value in world.picked.items())


def test_worst_tokens_lead_to_their_traces(panel_store: Store, boards: dict) -> None:
    """Each dot of the heatmap of |l| is the worst token that a recorder saw between two exports, and has its trace."""
    (target,) = (target for panel, _, target in queries(boards["slice"]) if panel.startswith("23 "))
    assert target["exemplar"] is True
    world = panel_store.world.but(
        picked=picks(boards["slice"], "at first", panel_store.world), rate=rate_interval(target)
    )
    span = {"start": world.recorded.end - 7 * STEP, "end": world.at}
    answer = panel_store.client.get("/query_exemplars", params={"query": filled(target["expr"], world), **span}).json()
    found = [exemplar for series in answer["data"] for exemplar in series["exemplars"]]
    assert all(re.fullmatch(r"[0-9a-f]{32}", one["labels"]["trace_id"]) for one in found)
    worst = [np.abs(batch.log_ratio).max() for batches in world.recorded.batches.values() for batch in batches]
    assert sorted(float(one["value"]) for one in found) == pytest.approx(sorted(worst), rel=1e-9)


def test_prometheus_reads_the_page_as_it_is(panel_store: Store) -> None:
    """What it scrapes from the evaluator is every sample of the page, and is what the other tests write."""
    found = {
        frozenset(row["metric"].items()): float(row["value"][1])
        for row in panel_store.ask(f'{{__name__=~"{SCRAPED_AS}kc_.*"}}', panel_store.world.but(at=time.time()))
    }
    own = {"job": "page", "instance": dict(next(iter(found)))["instance"]}
    expected = {
        frozenset((labels | own | {"__name__": SCRAPED_AS + labels["__name__"]}).items()): value
        for labels, value in parsed(panel_store.page)
    }
    assert found == expected
