"""Every query of every dashboard on a real Prometheus answers what a float64 computation says.

Real recorders and two real evaluators were played over five minutes; what they exported is in the store. What is
expected is made of what recorders were given and of what evaluators hold in memory (`tests/tools/panel_table.py`).
"""

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest

from kc_otel.contract import Contract
from kc_otel.generate.links import RL_UID, SLICE_UID
from tests.tools.panel_answers import agrees
from tests.tools.panel_cells import GRAFANAS, Expected, incidents, judged_pairs
from tests.tools.panel_counters import reported_kernels
from tests.tools.panel_rows import World
from tests.tools.panel_samples import parsed
from tests.tools.panel_store import SCRAPED_AS, Store, filled, rate_interval
from tests.tools.panel_table import TABLE
from tests.tools.panel_traffic import STEP

pytestmark = pytest.mark.slow

BOARDS = ("overview", "slice", "rl", "promotion", "health", "meaning")
CASES = (
    *((name, case) for name in BOARDS for case in ("at first", "what is broken", "several")),
    *((name, case) for name in BOARDS[:-2] for case in ("a training kernel", "an inference kernel")),
    *((name, "another contract") for name in BOARDS if name != "slice"),
    ("slice", "an operator"),
    *((name, "a minute before") for name in BOARDS if name != "slice"),
)
"""Dashboards, and what is picked on them; rules had recorded nothing a minute before."""


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
        found |= {"clause": ["reward"], "quantity": ["kc_drift_tv_seq"], "clauses": ["reward"], "slices": ["code"]}
        found["step"] = [f"{step([own])}"]
    if case == "several":
        found["clauses"], found["slices"] = ["token-tv", "token-kl"], ["all", "long-context"]
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
    """What is picked on a dashboard by each of its variables, as it is put into queries."""
    values = chosen(board, case, world)
    return {
        one["name"]: interpolated(one, values.get(one["name"]))
        for one in board["templating"]["list"]
        if one["type"] == "query"
    }


def repeats(panel: dict, values: Mapping[str, list[str]], contracts: tuple[Contract, ...]) -> Iterator[dict[str, str]]:
    """What is picked in each copy that Grafana makes of a panel: one value of the variable that it is repeated by."""
    every = {
        "contract": [one.name for one in contracts],
        "clauses": [clause.id for clause in contracts[0].clauses],
        "slices": ["all", *contracts[0].slices],
    }
    name = panel.get("repeat")
    yield from ({name: value} for value in values.get(name, every[name])) if name else ({},)


def queries(board: dict) -> Iterator[tuple[dict, str, int, dict]]:
    """(Panel, its name, place, target) of every query that Prometheus answers."""
    for panel in (inner for outer in board["panels"] for inner in (outer, *outer.get("panels", []))):
        for place, target in enumerate(one for one in panel.get("targets", []) if "expr" in one):
            yield panel, f"{panel['id']} {panel['title']}", place, target


def may_be_empty(contracts: tuple[Contract, ...]) -> set[tuple[str, ...]]:
    """(panel, query, value that it is repeated by) of queries that find nothing at first."""
    unsent = {("51 $clauses on $slice", ref, clause) for clause in ("logit-drift", "ttft") for ref in "ABC"}
    unkept = {("37 Log of what was received", ref) for ref in "AB"}
    unkept |= {("42 Left on the disk", "A"), ("43 The disk takes for the state", "A")}
    unsharded = {("38 Shards: bytes behind", "A"), ("39 Shards: streams", "A")}
    of_aggregators = {
        (panel, "ABC"[place]) for panel, each in TABLE["health"].items() if " Aggregators: " in panel
        for place in range(len(each))
    }  # fmt: skip
    return (
        unsent | unkept | unsharded | of_aggregators | {("14 $contract: margin of each clause", "A", contracts[1].name)}
    )


def differences(store: Store, world: World, expression: str, expected: Expected) -> Iterator[tuple]:
    """What is wrong with the answer to a query."""
    answers = {frozenset(row["metric"].items()): row for row in store.ask(expression, world)}
    wanted = expected(world)
    for key in answers.keys() ^ wanted.keys():
        yield "missing" if key in wanted else "not expected", dict(key)
    for key in answers.keys() & wanted.keys():
        if not agrees(answers[key], wanted[key]):
            yield dict(key), answers[key].get("value"), wanted[key]


def test_the_table_is_of_every_query_and_of_no_other(boards: dict) -> None:
    """A new query needs an expectation, and an expectation is of a query."""
    found: dict[str, dict[str, int]] = {}
    for name, board in boards.items():
        panels = found.setdefault(name, {})
        for _, panel, place, _ in queries(board):
            panels[panel] = place + 1
    assert found == {name: {panel: len(each) for panel, each in of.items()} for name, of in TABLE.items()}
    assert sum(count for panels in found.values() for count in panels.values()) > 125


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_query_answers_what_float64_says(panel_store: Store, boards: dict, name: str, case: str) -> None:
    """Series by series, in each copy of a panel; and at first each finds something, but for what nobody reports."""
    board, silent = boards[name], may_be_empty(panel_store.world.contracts)
    world, wrong = panel_store.world.but(picked=picks(board, case, panel_store.world)), []
    values = chosen(board, case, panel_store.world)
    if case == "a minute before":
        world = world.but(at=world.at - 60, range=100)
    for panel, title, place, target in queries(board):
        expected = TABLE[name][title][place]
        for one in repeats(panel, values, world.contracts):
            now = world.but(picked=world.picked | one)
            now = now.but(rate=rate_interval(target, now))
            where = (title, target["refId"], *one.values())
            wrong += [(*where, *each) for each in differences(panel_store, now, target["expr"], expected)]
            if case == "at first" and bool(expected(now)) == (where in silent):
                wrong.append((*where, "finds something" if where in silent else "finds nothing"))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", ["overview", "promotion", "health"])
def test_without_an_evaluator_nothing_is_zero(panel_store: Store, boards: dict, name: str) -> None:
    """A minute and a half after the last evaluation no count says anything, and the first tile how old all of it is."""
    world = panel_store.world.but(picked=picks(boards[name], "at first", panel_store.world))
    dead = world.but(at=world.recorded.end + 90, range=80)
    tiles = [one for one in queries(boards[name]) if one[0]["type"] == "stat" and one[1] != "8 Measured share"]
    assert all(panel["fieldConfig"]["defaults"]["noValue"] == "unknown" for panel, *_ in tiles)
    said = {
        title: panel_store.ask(target["expr"], dead.but(rate=rate_interval(target, dead)))
        for _, title, _, target in tiles
    }
    ages = [float(row["value"][1]) for title in [*said] if title.endswith("Evaluated") for row in said.pop(title)]
    assert ages == ([] if name == "promotion" else [dead.at - world.recorded.end])
    assert said
    assert not any(said.values())


@pytest.mark.parametrize("name", BOARDS)
def test_a_mark_is_where_something_is_broken(panel_store: Store, boards: dict, name: str) -> None:
    """Each incident of the picked contracts that lasts, on every board."""
    (mark,) = (one["expr"] for one in boards[name]["annotations"]["list"] if one["name"] == "Incidents")
    for case, some in (("at first", True), ("another contract", False)):
        world = panel_store.world.but(picked=picks(boards[name], case, panel_store.world))
        assert bool(incidents(world)) == some
        assert not list(differences(panel_store, world, mark, incidents))


@pytest.mark.parametrize("name", BOARDS)
def test_a_mark_is_where_a_kernel_version_appears(panel_store: Store, boards: dict, name: str) -> None:
    """Each pair that is judged and each kernel that reports is marked for five minutes, and no longer."""
    marks = {one["name"]: one["expr"] for one in boards[name]["annotations"]["list"] if one["name"] != "Incidents"}
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
    texts = [f"{{}} {row['value'][1]} {1000 * row['value'][0]}" for row in rows if not row["metric"]]
    return {re.search(variable["regex"].strip("/"), text)[1] for text in texts}


@pytest.mark.parametrize(("name", "case"), [one for one in CASES if one[1] != "a minute before"])
def test_variables_list_what_there_is(panel_store: Store, boards: dict, name: str, case: str) -> None:
    """Contracts, and of those that are picked the slices, clauses and kernel versions; what is picked is among them."""
    world = panel_store.world.but(picked=picks(boards[name], case, panel_store.world))
    values = chosen(boards[name], case, panel_store.world)
    contracts = [one for one in world.contracts if one.name in values.get("contract", [one.name])]
    reported = world.recorded.kernels.values() if world.contract in contracts else ()
    train, inference = ({pair[side].fingerprint for pair in reported} for side in (0, 1))
    clauses = {clause.id for one in contracts for clause in one.clauses}
    slices = {slice for one in contracts for slice in ("all", *one.slices)}
    expected = {
        "contract": {one.name for one in world.contracts},
        "clause": clauses,
        "clauses": clauses,
        "slice": slices,
        "slices": slices,
        "kernel_train": train,
        "kernel_inference": inference,
        "quantity": set(values.get("quantity", ())),
        "operator": {"attention", "norm"} if case == "an operator" else set(),
        "step": {f"{step(contracts)}"},
    }
    found = {
        one["name"]: listed(panel_store, one, world)
        for one in boards[name]["templating"]["list"]
        if one["type"] == "query"
    }
    assert found == {name: expected[name] for name in found}
    assert all(set(values.get(name, ())) <= every for name, every in found.items())


def test_numbers_are_in_the_unit_of_the_clause_that_is_picked(panel_store: Store, boards: dict) -> None:
    """Nats, steps, seconds and plain numbers: every panel with a unit of its own asks for that of its clause."""
    board, asked = boards["slice"], set()
    for clause in panel_store.world.contract.clauses:
        picked = picks(board, "at first", panel_store.world) | {"clause": clause.id, "clauses": clause.id}
        world = panel_store.world.but(picked=picked)
        for _, title, place, target in queries(board):
            if target["refId"] == "Unit":
                assert not list(differences(panel_store, world, target["expr"], TABLE["slice"][title][place])), title
                asked.add((title, GRAFANAS[clause.limit_unit]))
    assert len({title for title, _ in asked}) == 7
    assert {unit for _, unit in asked} == {"none", "s", "suffix: nat", "suffix: step"}


def test_values_that_mean_something_to_a_regular_expression_are_found(panel_store: Store, boards: dict) -> None:
    """A name with a dot, alone and with another, matches itself and not what the dot would stand for."""
    (variable,) = (one for one in boards["overview"]["templating"]["list"] if one["name"] == "slice")
    for values in (["a.b"], ["a.b", "c"]):
        pattern = interpolated(variable, values)
        for name, found in (("a.b", 1), ("axb", 0)):
            query = f'label_replace(label_replace(vector(1), "x", "{name}", "", ""), "y", "hit", "x", "{pattern}") '
            rows = panel_store.ask(query, panel_store.world)
            assert ("y" in rows[0]["metric"]) == bool(found), (values, name)


def test_worst_tokens_lead_to_their_traces(panel_store: Store, boards: dict) -> None:
    """Each dot of the heatmap of |l| is the worst token that a recorder saw between two exports, and has its trace."""
    (target,) = (target for panel, _, _, target in queries(boards["slice"]) if panel["id"] == 23)
    assert target["exemplar"] is True
    world = panel_store.world.but(picked=picks(boards["slice"], "at first", panel_store.world))
    world = world.but(rate=rate_interval(target, world))
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
        for row in panel_store.ask(
            f'last_over_time({{__name__=~"{SCRAPED_AS}kc_.*"}}[2h])', panel_store.world.but(at=time.time())
        )
    }
    own = {"job": "page", "instance": dict(next(iter(found)))["instance"]}
    expected = {
        frozenset((labels | own | {"__name__": SCRAPED_AS + labels["__name__"]}).items()): value
        for labels, value in parsed(panel_store.page)
    }
    assert found == expected
