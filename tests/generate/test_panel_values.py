"""Every query of every dashboard on a real Prometheus finds what recorders and evaluators exported.

Real recorders and two real evaluators were played over five minutes; what they exported is in the store. The numbers of
cells, and means, are compared with what evaluators hold in memory and with what recorders were given.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import pytest

from kc_otel.contract.model import Contract
from kc_otel.generate.links import RL_UID, SLICE_UID
from kc_otel.judge.verdict import Status, Verdict
from tests.tools.panel_store import CELL, Labels, Store, World, by, filled, rate_interval
from tests.tools.panel_traffic import STEP, TRAFFIC

pytestmark = pytest.mark.slow

BOARDS = ("overview", "slice", "rl", "promotion", "health")
CASES = (
    *((name, case) for name in BOARDS for case in ("at first", "what is broken", "several")),
    *((name, case) for name in BOARDS[:-1] for case in ("a training kernel", "an inference kernel")),
    *((name, "another contract") for name in BOARDS if name != "slice"),
    ("slice", "an operator"),
    *((name, "a minute before") for name in BOARDS if name != "slice"),
)
"""Dashboards, and what is picked on them."""


def chosen(board: dict, case: str, world: World) -> dict[str, list[str]]:
    """What a person picked, by variable; of those that are not named the dashboard's own start, or all."""
    own, other = world.contracts
    train, inference = (kernel.fingerprint for kernel in world.recorded.kernels["fp8"])
    found: dict[str, list[str]] = {"step": [f"{step([own, other])}"]}
    if board["uid"] in {RL_UID, SLICE_UID}:
        found["slice"] = ["all"]
    if board["uid"] == SLICE_UID:
        found |= {"contract": [own.name], "clause": ["token-tv"], "quantity": ["kc_drift_tv_token"]}
        found["step"] = [f"{step([own])}"]
    if case == "what is broken":
        found |= {"contract": [own.name], "slice": ["code"], "kernel_train": [train], "kernel_inference": [inference]}
        found |= {"clause": ["reward"], "quantity": ["kc_drift_tv_seq"]}
        found["step"] = [f"{step([own])}"]
    if case == "several":
        found["kernel_inference"] = [inference, world.recorded.kernels["bf16"][1].fingerprint]
        if board["uid"] != SLICE_UID:
            found |= {"contract": [own.name, other.name], "slice": ["code", "all"], "clause": ["token-tv", "token-kl"]}
    if case == "an inference kernel":
        found["kernel_inference"] = [world.recorded.kernels["bf16"][1].fingerprint]
    if case == "a training kernel":
        found["kernel_train"] = [world.recorded.kernels["int4"][0].fingerprint]
    if case == "another contract":
        found |= {"contract": [other.name], "step": [f"{step([other])}"]}
    if case == "an operator":
        found |= {"clause": ["attention"], "quantity": ["kc_drift_operator_relative"], "operator": ["attention"]}
    return found


def step(contracts: Iterable[Contract]) -> int:
    """A quarter of the longest heartbeat, seconds, and no less than half a minute."""
    return max(30, math.ceil(max(contract.observability.heartbeat for contract in contracts) / 4))


def interpolated(variable: dict, values: list[str] | None) -> str:
    """What Grafana puts into PromQL for a variable; None for all of its values.

    Source: Grafana's Prometheus data source, `interpolateQueryExpr`: values of a variable that can hold several are
    escaped for regular expressions, and several stand in parentheses.
    """
    if not variable["multi"]:
        (value,) = values or ()
        return value
    if values is None:
        return variable["allValue"]
    escaped = [re.sub(r"[$^*{}\[\]'+?.()|\\]", r"\\\\\g<0>", value) for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def picks(board: dict, case: str, world: World) -> dict[str, str]:
    values = chosen(board, case, world)
    return {
        variable["name"]: interpolated(variable, values.get(variable["name"]))
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    }


def repeats(panel: dict, values: Mapping[str, list[str]], contracts: tuple[Contract, ...]) -> Iterator[dict[str, str]]:
    """What is picked in each copy that Grafana makes of a panel: one value of the variable that it is repeated by."""
    every = [contract.name for contract in contracts]
    name = panel.get("repeat")
    yield from ({name: value} for value in values.get(name, every)) if name else ({},)


def queries(board: dict) -> Iterator[tuple[dict, str, int, dict]]:
    """(Panel, its name, place, target) of every query that Prometheus answers."""
    for panel in (inner for outer in board["panels"] for inner in (outer, *outer.get("panels", []))):
        for place, target in enumerate(target for target in panel.get("targets", []) if "expr" in target):
            yield panel, f"{panel['id']} {panel['title']}", place, target


def may_be_empty(contracts: tuple[Contract, ...]) -> set[tuple[str, ...]]:
    """(panel, query, value that it is repeated by) of queries that find nothing at first."""
    on_disk = ("37 Not in the snapshot yet", "42 Left on the disk", "43 The disk takes for the state")
    unkept = {(title, "A") for title in on_disk}
    unsharded = {("38 Shards: bytes behind", "A"), ("39 Shards: streams", "A")}
    faults = {("48 Endpoints disabled for", "A")}
    return unkept | unsharded | faults | {("14 $contract: margin of each clause", "A", contracts[1].name)}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_query_is_answered(panel_store: Store, boards: dict, name: str, case: str) -> None:
    board, silent = boards[name], may_be_empty(panel_store.world.contracts)
    world, wrong = panel_store.world.but(picked=picks(board, case, panel_store.world)), []
    values = chosen(board, case, panel_store.world)
    if case == "a minute before":
        world = world.but(at=world.at - 60, range=100)
    for panel, title, _, target in queries(board):
        for pick in repeats(panel, values, world.contracts):
            now = world.but(picked=world.picked | pick)
            found = panel_store.ask(target["expr"], now.but(rate=rate_interval(target, now)))
            where = (title, target["refId"], *pick.values())
            if case == "at first" and bool(found) == (where in silent):
                wrong.append((*where, "finds something" if found else "finds nothing"))
    assert not wrong, "\n".join(map(str, wrong))


CODES = (Status.PASS, Status.INCONCLUSIVE, Status.NO_DATA, Status.FAIL)
Of = Callable[[Verdict, float], float]


def margin(verdict: Verdict, _: float) -> float:
    return (verdict.limit - (verdict.lower if verdict.status is Status.FAIL else verdict.upper)) / abs(verdict.limit)


OF_CELLS: tuple[tuple[Of, Callable], ...] = (
    (lambda verdict, _: CODES.index(verdict.status), max),
    (lambda _, since: 1000.0 * since, min),
    (margin, min),
    (lambda verdict, _: verdict.estimate, max),
    (lambda verdict, _: verdict.lower, max),
    (lambda verdict, _: verdict.upper, max),
    (lambda verdict, _: verdict.limit, max),
    (lambda verdict, _: verdict.samples, max),
    (lambda verdict, _: verdict.evidence, max),
)
"""The columns of the table of all cells, and which of two evaluators' numbers stands there."""


def answers(store: Store, board: dict, title: str, place: int, world: World) -> dict[Labels, float]:
    (target,) = (target for _, panel, at, target in queries(board) if (panel, at) == (title, place))
    rows = store.ask(target["expr"], world.but(rate=rate_interval(target, world)))
    return {frozenset(row["metric"].items()): float(row["value"][1]) for row in rows}


@pytest.mark.parametrize("case", ["at first", "what is broken", "several", "another contract"])
def test_cells_are_shown_as_evaluators_have_them(panel_store: Store, boards: dict, case: str) -> None:
    board = boards["overview"]
    world = panel_store.world.but(picked=picks(board, case, panel_store.world))
    for place, (of, how) in enumerate(OF_CELLS):
        found = answers(panel_store, board, "11 Every cell: state, since when, margin", place, world)
        assert found == pytest.approx(by(CELL, world.cells(of), how), rel=1e-9), place
    codes = [*by(CELL, world.cells(OF_CELLS[0][0])).values()]
    for title, status in (("1 Broken", Status.FAIL), ("2 No data", Status.NO_DATA), ("4 Holding", Status.PASS)):
        assert answers(panel_store, board, title, 0, world) == {frozenset(): codes.count(CODES.index(status))}


def test_a_cell_is_shown_with_its_band(panel_store: Store, boards: dict) -> None:
    board, title = boards["slice"], "10 $clause on $slice: value with its confidence band, against the limit"
    world = panel_store.world.but(picked=picks(board, "what is broken", panel_store.world))
    for place, (column, how) in enumerate([(5, max), (4, min), (3, max), (6, max)]):
        rows = [row for row in world.cells(OF_CELLS[column][0]) if row[0]["kc_clause"] == world.picked["clause"]]
        assert answers(panel_store, board, title, place, world) == pytest.approx(by((), rows, how), rel=1e-9), place


def test_drift_is_shown_as_it_was_measured(panel_store: Store, boards: dict) -> None:
    board = boards["rl"]
    clip = panel_store.world.contract.assumptions.clip
    for title, of in (
        ("4 Total variation per token", lambda ratio: np.maximum(-np.expm1(ratio), 0.0)),
        ("6 KL(Q||P), k3", lambda ratio: np.expm1(ratio) - ratio),
        ("2 Share of the clip range that the kernels spend", lambda ratio: np.abs(ratio) / math.log1p(clip)),
    ):
        world = panel_store.world.but(picked=picks(board, "at first", panel_store.world))
        (target,) = (target for _, panel, at, target in queries(board) if (panel, at) == (title, 0))
        world = world.but(rate=rate_interval(target, world))
        expected = by(
            ("kc_contract", "kc_slice"),
            world.log_ratios(),
            lambda parts, of=of: float(of(np.concatenate([part.ravel() for part in parts])).mean()),
        )
        assert answers(panel_store, board, title, 0, world) == pytest.approx(expected, rel=1e-6), title


@pytest.mark.parametrize("name", ["overview", "health"])
def test_without_an_evaluator_nothing_is_zero(panel_store: Store, boards: dict, name: str) -> None:
    """A minute and a half after the last evaluation no count says anything, and the first tile how old all of it is."""
    world = panel_store.world.but(picked=picks(boards[name], "at first", panel_store.world))
    dead = world.but(at=world.recorded.end + 90, range=80)
    tiles = [query for query in queries(boards[name]) if query[0]["type"] == "stat" and query[1] != "8 Measured share"]
    assert all(panel["fieldConfig"]["defaults"]["noValue"] == "unknown" for panel, *_ in tiles)
    said = {
        title: panel_store.ask(target["expr"], dead.but(rate=rate_interval(target, dead)))
        for _, title, _, target in tiles
    }
    ages = [float(row["value"][1]) for title in [*said] if title.endswith("Evaluated") for row in said.pop(title)]
    assert ages == [dead.at - world.recorded.end]
    assert said
    assert not any(said.values())


@pytest.mark.parametrize("name", BOARDS)
def test_marks_are_where_something_is_broken_or_appears(panel_store: Store, boards: dict, name: str) -> None:
    marks = {annotation["name"]: annotation["expr"] for annotation in boards[name]["annotations"]["list"]}
    assert marks.keys() == {"Incidents", "Kernel versions judged", "Kernel versions reported"}
    for case, some in (("at first", True), ("another contract", False)):
        world = panel_store.world.but(picked=picks(boards[name], case, panel_store.world))
        assert bool(panel_store.ask(marks["Incidents"], world)) == some
    world = panel_store.world.but(picked=picks(boards[name], "at first", panel_store.world))
    for title in ("Kernel versions judged", "Kernel versions reported"):
        assert panel_store.ask(marks[title], world), title
        assert not panel_store.ask(marks[title], world.but(at=world.recorded.end + 290)), title


def listed(store: Store, variable: dict, world: World) -> set[str]:
    """Values of a variable. `label_values` and `query_result` are calls of Grafana's, which asks as it is done here."""
    query = variable["query"]["query"]
    if matched := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
        given = {"match[]": filled(matched[1], world)}
        return set(store.client.get(f"/label/{matched[2]}/values", params=given).json()["data"])
    rows = store.ask(re.fullmatch(r"query_result\((.*)\)", query)[1], world)
    texts = [f"{{}} {row['value'][1]} {1000 * row['value'][0]}" for row in rows if not row["metric"]]
    return {re.search(variable["regex"].strip("/"), text)[1] for text in texts}


@pytest.mark.parametrize(("name", "case"), [case for case in CASES if case[1] != "a minute before"])
def test_variables_list_what_there_is(panel_store: Store, boards: dict, name: str, case: str) -> None:
    world = panel_store.world.but(picked=picks(boards[name], case, panel_store.world))
    values = chosen(boards[name], case, panel_store.world)
    contracts = [contract for contract in world.contracts if contract.name in values.get("contract", [contract.name])]
    reported = world.recorded.kernels.values() if world.contract in contracts else ()
    train, inference = ({pair[side].fingerprint for pair in reported} for side in (0, 1))
    clauses = {clause.id for contract in contracts for clause in contract.clauses}
    slices = {slice for contract in contracts for slice in ("all", *contract.slices)}
    expected = {
        "contract": {contract.name for contract in world.contracts},
        "clause": clauses,
        "slice": slices,
        "kernel_train": train,
        "kernel_inference": inference,
        "quantity": set(values.get("quantity", ())),
        "operator": {"attention", "norm"} if case == "an operator" else set(),
        "step": {f"{step(contracts)}"},
    }
    found = {
        variable["name"]: listed(panel_store, variable, world)
        for variable in boards[name]["templating"]["list"]
        if variable["type"] == "query"
    }
    assert found == {name: expected[name] for name in found}
    assert all(set(values.get(name, ())) <= every for name, every in found.items())


def test_numbers_are_in_the_unit_of_the_clause_that_is_picked(panel_store: Store, boards: dict) -> None:
    board, asked = boards["slice"], set()
    units = {"1": "none", "s": "s", "{nat}": "suffix: nat", "{step}": "suffix: step", "{ulp}": "suffix: ulp"}
    for clause in panel_store.world.contract.clauses:
        picked = picks(board, "at first", panel_store.world) | {"clause": clause.id}
        for _, title, _, target in queries(board):
            if target["refId"] == "Unit":
                rows = panel_store.ask(target["expr"], panel_store.world.but(picked=picked))
                assert [row["metric"] for row in rows] == [{"kc_clause_unit": units[clause.limit_unit]}], title
                asked.add((title, units[clause.limit_unit]))
    assert len({title for title, _ in asked}) == 4
    assert {unit for _, unit in asked} == {"none", "s", "suffix: nat", "suffix: step"}


def test_worst_tokens_lead_to_their_traces(panel_store: Store, boards: dict) -> None:
    """Each dot of the heatmap of |l| is the worst token that a recorder saw between two exports, and has its trace.

    Those of an export that was refused are lost.
    """
    (target,) = (target for panel, _, _, target in queries(boards["slice"]) if panel["id"] == 23)
    assert target["exemplar"] is True
    world = panel_store.world.but(picked=picks(boards["slice"], "at first", panel_store.world))
    world = world.but(rate=rate_interval(target, world))
    span = {"start": world.recorded.end - 7 * STEP, "end": world.at}
    answer = panel_store.client.get("/query_exemplars", params={"query": filled(target["expr"], world), **span}).json()
    found = [exemplar for series in answer["data"] for exemplar in series["exemplars"]]
    assert all(re.fullmatch(r"[0-9a-f]{32}", exemplar["labels"]["trace_id"]) for exemplar in found)
    arrived = [batches for name, batches in world.recorded.batches.items() if not TRAFFIC[name].refused]
    worst = [np.abs(batch.log_ratio).max() for batches in arrived for batch in batches]
    assert sorted(float(exemplar["value"]) for exemplar in found) == pytest.approx(sorted(worst), rel=1e-9)
