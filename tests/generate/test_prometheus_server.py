"""A real Prometheus with a page like the evaluator's and a recorder's exports runs every rule and dashboard query."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
import yaml

from kc_otel.contract import Contract
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.grafana.queries import ACTION_BITS
from kc_otel.generate.links import panel_id
from kc_otel.generate.prometheus.rules import rule_file

pytestmark = pytest.mark.slow

BROKEN = ("token-tv", "code")
"""Clause and slice that the page says are broken, with the first inference kernel alone."""
PAIRS = 2
"""Pairs of kernel versions on the page."""


@pytest.fixture(scope="module")
def address(metrics_page: ModuleType, policy: Contract) -> Iterator[str]:
    """Of a server whose `/metrics` is like the evaluator's."""
    with metrics_page.serve(policy) as found:
        yield found


@pytest.fixture(scope="module")
def prometheus(
    program, servers: ModuleType, policy: Contract, address: str, tmp_path_factory
) -> Iterator[httpx.Client]:
    """A client of a Prometheus that scrapes the page and evaluates the contract's rules every second."""
    folder, own = tmp_path_factory.mktemp("prometheus"), servers.free_address()
    (folder / "rules.yaml").write_text(rule_file(policy).text.replace("interval: 15s", "interval: 1s"))
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "kc-otel", "static_configs": [{"targets": [address]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={own}",
        "--web.enable-remote-write-receiver",
        "--enable-feature=native-histograms,exemplar-storage",
    ]
    with (
        servers.running(command, folder / "log", f"http://{own}/-/ready"),
        httpx.Client(base_url=f"http://{own}/api/v1", timeout=10, trust_env=False) as client,
    ):
        _until_it_fires(client, folder / "log")
        yield client


def _until_it_fires(client: httpx.Client, log: Path) -> None:
    """Until counters have been scraped a few times and the first alert fires."""
    deadline, wanted = time.monotonic() + 60, ("kc_evaluator_points_total > 50", 'ALERTS{alertstate="firing"}')
    while not all(client.get("/query", params={"query": one}).json()["data"]["result"] for one in wanted):
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


@pytest.fixture(scope="module")
def recorded(
    policy: Contract, prometheus: httpx.Client, exports: ModuleType, remote_write: ModuleType
) -> dict[str, np.ndarray]:
    """What a recorder measured on slice `code`, and exported into the Prometheus over the last minute."""
    found, values = exports.record(policy)
    now = int(time.time() * 1000)
    timed = [(now - 8000 * (len(found) - place), data) for place, data in enumerate(found, start=1)]
    content = remote_write.body(remote_write.of_exports(timed))
    written = prometheus.post("/write", content=content, headers=remote_write.HEADERS)
    assert written.status_code == 204, written.text
    return values


def _variables(board: dict, policy: Contract) -> dict[str, str]:
    """Values of a dashboard's variables: of those that hold one value the broken cell's, everything else all."""
    one = {"contract": policy.name, "clause": BROKEN[0], "slice": BROKEN[1], "quantity": "kc_drift_tv_token"}
    return {
        variable["name"]: variable["allValue"] if variable.get("multi") else one[variable["name"]]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    }


def _ask(client: httpx.Client, expression: str, variables: dict[str, str]) -> list[dict]:
    answer = client.get("/query", params={"query": _filled(expression, variables)}).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def _filled(expression: str, variables: dict[str, str]) -> str:
    text = expression.replace("$__range", "1h").replace("$__rate_interval", "2m")
    for name, value in sorted(variables.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(f"${name}", value)
    assert "$" not in text, text
    return text


def _panels(board: dict) -> list[dict]:
    return [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("name", ["overview", "slice", "rl", "promotion", "health"])
def test_every_query_of_a_dashboard_finds_data(
    prometheus: httpx.Client, boards: dict, policy: Contract, name: str
) -> None:
    """No panel is empty and no mark is missing when every metric is there."""
    board, asked = boards[name], 0
    variables = _variables(board, policy)
    expressions = [
        (panel["title"], target["expr"])
        for panel in _panels(board)
        for target in panel.get("targets", [])
        if "expr" in target
    ]
    expressions += [(one["name"], one["expr"]) for one in board["annotations"].get("list", [])]
    for title, expression in expressions:
        assert _ask(prometheus, expression, variables), (title, expression)
        asked += 1
    assert asked > 15


def _column(prometheus: httpx.Client, board: dict, policy: Contract, id: int, refs: dict[str, str]) -> dict:
    """Values of a table's columns, by clause, slice and inference kernel."""
    (table,) = (panel for panel in _panels(board) if panel["id"] == id)
    found: dict[str, dict] = {}
    for target in table["targets"]:
        if target["refId"] in refs:
            found[refs[target["refId"]]] = {
                (row["metric"]["kc_clause"], row["metric"]["kc_slice"], row["metric"]["kc_kernel_inference"]): float(
                    row["value"][1]
                )
                for row in _ask(prometheus, target["expr"], _variables(board, policy))
            }
    return found


def test_the_top_of_the_board_says_what_is_broken(prometheus: httpx.Client, boards: dict, policy: Contract) -> None:
    """One cell fails, the others pass; the first table holds that cell alone, with what was done about it."""
    board = boards["overview"]
    stats = {panel["title"]: panel["targets"][0]["expr"] for panel in board["panels"] if panel["type"] == "stat"}
    variables = _variables(board, policy)
    counts = {title: float(_ask(prometheus, query, variables)[0]["value"][1]) for title, query in stats.items()}
    cells = len(policy.clauses) * (2 + len(policy.slices)) * PAIRS
    assert counts["Broken"] == 1
    assert counts["Holding"] == cells - 1
    assert counts["No data"] == counts["Undecided"] == 0
    assert counts["Points received"] > 0
    titles = {"A": "state", "B": "since", "D": "done", "E": "alert", "F": "meaning"}
    broken = (*BROKEN, "x")
    columns = _column(prometheus, board, policy, 7, titles)
    bits = [name for name, *_ in ACTION_BITS]
    done = sum(2 ** (len(bits) - 1 - bits.index(name)) for name in ("halt", "route", "hold", "tell"))
    assert columns == {
        "state": {broken: Status.FAIL.code},
        "since": {broken: 1.7e12},
        "done": {broken: done},
        "alert": {broken: 3.0},
        "meaning": {broken: panel_id(policy.name, BROKEN[0])},
    }


def test_the_evidence_of_a_gate_tells_kernel_versions_apart(
    prometheus: httpx.Client, boards: dict, policy: Contract
) -> None:
    """The pair with the broken cell is FAIL and passes since never; the other passes, all of the time."""
    board = boards["promotion"]
    (table,) = (panel for panel in _panels(board) if panel["id"] == 12)
    rows = [
        {
            row["metric"]["kc_kernel_inference"]: float(row["value"][1])
            for row in _ask(prometheus, target["expr"], _variables(board, policy))
        }
        for target in table["targets"]
    ]
    worst, since, share, margin, samples, cells = rows
    assert worst == {"x": Status.FAIL.code, "y": Status.PASS.code}
    assert since == {"y": 1.7e12}
    assert share == {"x": 0.0, "y": 1.0}
    assert margin.keys() == samples.keys() == {"x", "y"}
    assert cells["x"] == cells["y"] == len(policy.clauses) * (2 + len(policy.slices))


def test_the_rl_board_shows_what_a_float64_computation_says(
    prometheus: httpx.Client, boards: dict, policy: Contract, recorded: dict[str, np.ndarray]
) -> None:
    """Means exactly, quantiles to the width of a bucket, bounds with the contract's own constants."""
    board, given = boards["rl"], policy.assumptions
    panels = {panel["title"]: panel for panel in _panels(board)}
    log_ratio, advantages = recorded["log_ratio"], recorded["advantages"]
    ratio, whole = np.exp(log_ratio), np.exp(log_ratio.sum(1))
    tv_seq = np.maximum(1.0 - whole, 0.0).mean()

    def shown(title: str, ref: str = "A") -> float:
        (target,) = (target for target in panels[title]["targets"] if target["refId"] == ref)
        rows = _ask(prometheus, target["expr"], _variables(board, policy))
        (value,) = (row["value"][1] for row in rows if row["metric"]["kc_slice"] == BROKEN[1])
        return float(value)

    def about(value: float) -> object:
        return pytest.approx(value, rel=1e-4, abs=1e-6)

    assert shown("Share of the clip range that the kernels spend") == about(
        np.abs(log_ratio).mean() / np.log1p(given.clip)
    )
    assert shown("Effective sample size, per sample") == about(1 / (1 + ((ratio - 1) ** 2).mean()))
    assert shown("Effective sample size, per sample", "B") == about(1 / (1 + ((whole - 1) ** 2).mean()))
    assert shown("Total variation per token") == about(np.maximum(1 - ratio, 0).mean())
    assert shown("Most that the reward can differ") == about(tv_seq)
    assert shown("Most that the gradient can be biased") == about(2 * 5 * 4096 * 40 * tv_seq)
    assert shown("Support deficit") == about(1 - ratio.mean())
    push = (ratio - 1) * advantages[:, None]
    assert shown("Advantage-signed drift") == about(push[advantages > 0].mean())
    assert shown("Advantage-signed drift", "B") == about(push[advantages < 0].mean())
    assert shown("Weight lag") == pytest.approx(1.0, rel=0.05)
    width = 2 ** (2**-4)
    for ref, rank in (("A", 0.01), ("B", 0.5), ("C", 0.99), ("D", 0.999)):
        value = np.quantile(ratio, rank)
        assert value / width <= shown("Importance ratio of sampled tokens", ref) <= value * width


def test_worst_tokens_lead_to_their_traces(
    prometheus: httpx.Client, boards: dict, policy: Contract, recorded: dict[str, np.ndarray]
) -> None:
    """The exemplars behind the heatmap of |l| carry trace ids, and their values are those of the worst tokens."""
    (panel,) = (panel for panel in _panels(boards["slice"]) if panel["id"] == 23)
    assert panel["targets"][0]["exemplar"] is True
    expression = _filled(panel["targets"][0]["expr"], _variables(boards["slice"], policy))
    window = {"start": time.time() - 600, "end": time.time() + 60}
    answer = prometheus.get("/query_exemplars", params={"query": expression, **window}).json()
    found = [exemplar for series in answer["data"] for exemplar in series["exemplars"]]
    assert all(re.fullmatch(r"[0-9a-f]{32}", exemplar["labels"]["trace_id"]) for exemplar in found)
    assert max(float(exemplar["value"]) for exemplar in found) >= np.abs(recorded["log_ratio"]).max() - 1e-6


def test_the_slice_board_shows_the_quantiles_of_the_tokens(
    prometheus: httpx.Client, boards: dict, policy: Contract, recorded: dict[str, np.ndarray]
) -> None:
    """The mean of the clause's quantity exactly, and the fan of log ratios to the width of a bucket."""
    panels = {panel["id"]: panel for panel in _panels(boards["slice"])}

    def shown(id: int) -> list[float]:
        rows = (
            _ask(prometheus, target["expr"], _variables(boards["slice"], policy)) for target in panels[id]["targets"]
        )
        return [float(row["value"][1]) for (row,) in rows]

    log_ratio = recorded["log_ratio"].ravel()
    assert shown(21)[0] == pytest.approx(np.maximum(1 - np.exp(log_ratio), 0).mean(), rel=1e-4)
    for found, rank in zip(shown(22), (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999), strict=True):
        assert found == pytest.approx(np.quantile(log_ratio, rank), rel=0.05, abs=2e-3)


def test_a_heatmap_is_the_distribution_of_the_tokens(
    prometheus: httpx.Client, boards: dict, policy: Contract, recorded: dict[str, np.ndarray]
) -> None:
    """At every edge of a bucket, the share of tokens below it is that of a float64 computation."""
    (panel,) = (panel for panel in _panels(boards["slice"]) if panel["id"] == 23)
    assert panel["type"] == "heatmap"
    (row,) = _ask(prometheus, panel["targets"][0]["expr"], _variables(boards["slice"], policy))
    buckets = row["histogram"][1]["buckets"]
    edges = np.array([float(bucket[2]) for bucket in buckets])
    counts = np.array([float(bucket[3]) for bucket in buckets])
    sorted_values = np.sort(np.abs(recorded["log_ratio"]).ravel())
    below = np.searchsorted(sorted_values, edges, side="right") / sorted_values.size
    assert len(edges) > 50
    # A token that lies on an edge to float32's last bit may be counted on either side of it.
    assert np.cumsum(counts) / counts.sum() == pytest.approx(below, abs=1.5 / sorted_values.size)


@pytest.mark.usefixtures("recorded")
def test_variables_list_what_there_is(prometheus: httpx.Client, boards: dict, policy: Contract) -> None:
    """`label_values` and `query_result` are calls of Grafana's; here they are asked of Prometheus as Grafana does."""
    found: dict[str, dict] = {}
    for name, board in boards.items():
        variables, values = _variables(board, policy), found.setdefault(name, {})
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            query = variable["query"]["query"]
            if matched := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
                match = {"match[]": _filled(matched[1], variables)}
                values[variable["name"]] = prometheus.get(f"/label/{matched[2]}/values", params=match).json()["data"]
            else:
                rows = _ask(prometheus, re.fullmatch(r"query_result\((.*)\)", query)[1], variables)
                pattern = re.compile(variable["regex"].strip("/"))
                texts = [",".join(f'{key}="{value}"' for key, value in row["metric"].items()) for row in rows]
                values[variable["name"]] = [pattern.search(text)[1] for text in texts]
    slices = sorted(["all", *policy.slices, "other"])
    kernels = {"kernel_train": ["x"], "kernel_inference": ["x", "y"]}
    assert found["overview"] == {"contract": [policy.name], "slice": slices, **kernels}
    assert found["slice"] == {
        "contract": [policy.name],
        "clause": sorted(clause.id for clause in policy.clauses),
        "slice": slices,
        **kernels,
        "quantity": ["kc_drift_tv_token"],
        "operator": [],
    }
    assert found["health"] == {"contract": [policy.name]}
    assert found["meaning"] == {}


def test_every_rule_runs_and_the_breach_fires_with_its_numbers(prometheus: httpx.Client) -> None:
    """All rules are healthy; the step without `for` fires for the broken cell alone and tells bounds and limit."""
    groups = prometheus.get("/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    firing = [alert for rule in rules for alert in rule["alerts"] if alert["state"] == "firing"]
    (alert,) = (alert for alert in firing if alert["labels"]["severity"] == "warning")
    assert (alert["labels"]["clause"], alert["labels"]["slice"]) == BROKEN
    assert alert["labels"]["alertname"] == "KernelContractBroken"
    assert alert["annotations"]["summary"] == "policy-7b: token-tv is broken on slice code"
    numbers = "Now: estimate 0.006, lower bound 0.005, upper bound 0.007, limit 0.004."
    assert numbers in alert["annotations"]["description"]
    assert "{{ rewards }} and ${HOME}" in alert["annotations"]["description"]
    assert alert["annotations"]["dashboard"] == "/d/kc-overview?var-contract=policy-7b&var-slice=code"
