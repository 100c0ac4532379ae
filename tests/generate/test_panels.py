"""Every query of every dashboard, on a real Prometheus with a series of each metric of the registry, finds it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint

from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, RECORDED
from kc_otel.contract.registry.own_metrics import METRICS, Instrument, label, prometheus_name
from kc_otel.generate.grafana import queries
from tests.generate.test_dashboards import NAMES, panels
from tests.tools.remote_write import HEADERS, Series, body
from tests.tools.servers import free_address, running

pytestmark = pytest.mark.slow

END, STEP, LASTING = 1_760_000_000, 10, 280
"""The last sample, seconds between two, and for how long there are some: less than the five minutes of a mark."""
KNOWN = {
    "kc.contract": "policy", "kc.slice": "all", "kc.kernel.train": "v1", "kc.kernel.inference": "v2",
    "kc.severity": "critical", "kc.action": "route:train-kernel", "kc.route.kernel": "train-kernel",
    "kc.clause.unit": "{nat}", "kc.operator": "attention",
}  # fmt: skip
"""Values of attributes that queries ask for; those of others are any."""
VALUES = {"kc.verdict": 3.0, "kc.evaluator.last_evaluation": END, "kc.promotion.stage": 2.0, "kc.bound.limit": 0.5}
(STALE,) = struct.unpack("<d", bytes.fromhex("020000000000f07f"))
"""What Prometheus writes of a target that does not answer."""
SINGLE = {"quantity": prometheus_name(QUANTITIES["tv_token"]), "step": "30"}


def clauses() -> Iterator[dict[str, str]]:
    """A clause on each metric, in a statistic that boards look for limits of."""
    for metric in (*QUANTITIES, *DERIVED):
        for statistic in ("mean", "p99"):
            yield {"kc.clause": f"{metric}-{statistic}", "kc.clause.metric": metric, "kc.clause.statistic": statistic}


def numbers() -> Iterator[Series]:
    """A series of each metric that is a number; of what clauses have, one for each clause."""
    times = range(END - LASTING, END + 1, STEP)
    for metric in METRICS.values():
        if metric.name.startswith("kc.rule"):
            continue
        each = list(clauses()) if "kc.clause" in metric.attributes else [{}]
        each = [{"kc.clause.metric": derived} for derived in DERIVED] if metric.name == "kc.contract.factor" else each
        outcomes = ("accepted", "late", "ignored") if "kc.outcome" in metric.attributes else ("",)
        for of in each:
            for outcome in outcomes:
                given = {**KNOWN, **of, "kc.outcome": outcome}
                names = {label(name): given.get(name, name) for name in metric.attributes}
                value = VALUES.get(metric.name, 1.0)
                rising = metric.instrument is Instrument.COUNTER
                samples = [(1000 * at, value * (place + 1 if rising else 1)) for place, at in enumerate(times)]
                yield Series({"__name__": prometheus_name(metric), **names}, samples=samples)


def histograms() -> Iterator[Series]:
    """A drift histogram of each quantity that grows by an observation a step."""
    for quantity in RECORDED.values():
        points = []
        for count, at in enumerate(range(END - LASTING, END + 1, STEP), start=1):
            point = ExponentialHistogramDataPoint(count=count, sum=0.1 * count, scale=4)
            point.positive.offset = -54
            point.positive.bucket_counts.append(count)
            points.append((1000 * at, point))
        names = {"kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference", "kc.operator"}
        labels = {label(name): KNOWN[name] for name in names}
        yield Series({"__name__": prometheus_name(quantity), **labels}, histograms=points)


@pytest.fixture(scope="module")
def ask(program: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that returns the values that a query finds at a time."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    (folder / "config.yml").write_text("{}")
    own = free_address()
    command = [
        *(program("prometheus"), f"--config.file={folder / 'config.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={own}", "--web.enable-remote-write-receiver"),
        "--enable-feature=native-histograms",
    ]
    with (
        running(command, folder / "log", f"http://{own}/-/ready"),
        httpx.Client(base_url=f"http://{own}/api/v1", timeout=10, trust_env=False) as client,
    ):
        name, scraped = prometheus_name(METRICS["kc.evaluator.last_evaluation"]), (1000 * (END + 80), END + 80)
        other = Series({"__name__": name, "kc_contract": "other"}, samples=[scraped])
        gone = Series({"__name__": name, "kc_contract": "gone"}, samples=[scraped, (1000 * (END + 85), STALE)])
        written = client.post("/write", content=body([*numbers(), *histograms(), other, gone]), headers=HEADERS)
        assert written.status_code == 204, written.text

        def asked(expression: str, at: float = END, span: str = "300s", **picked: str) -> list[float]:
            text = expression.replace("$__range", span).replace("$__rate_interval", "120s")
            for name, value in ({"operator": ".*", "slice": "all"} | SINGLE | picked).items():
                text = re.sub(rf"\$({name}\b|{{{name}}})", value, text)
            text = re.sub(r"\$(contract|clause|kernel_train|kernel_inference)\b", ".*", text)
            answer = client.get("/query", params={"query": text, "time": at}).json()
            assert answer["status"] == "success", (text, answer)
            return [float(row["value"][1]) if "value" in row else 1.0 for row in answer["data"]["result"]]

        yield asked


def targets(board: dict) -> Iterator[tuple[dict, str]]:
    """Panels, and the queries of each that Prometheus answers."""
    for panel in panels(board):
        yield from ((panel, target["expr"]) for target in panel.get("targets", []) if "expr" in target)


PICKED = {"clause": "tv_token-mean"}
EMPTY = {
    "overview": ["Verdicts over time"],
    "health": ["Tokens counted as `other`"],
    "promotion": ["Evidence by kernel version"],
}
"""Every cell was broken, no slice is beyond the cap, and nothing has been PASS since some time."""


@pytest.mark.parametrize("name", NAMES)
def test_every_query_finds_what_is_there(ask, boards, name):
    empty = [panel["title"] for panel, text in targets(boards[name]) if not ask(text, **PICKED)]
    assert empty == EMPTY.get(name, [])
    assert all(ask(mark["expr"]) for mark in boards[name]["annotations"]["list"])


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_has_something_to_pick(ask, boards, name):
    variables = [variable for variable in boards[name]["templating"]["list"] if variable["type"] == "query"]
    assert variables
    for text in (variable["query"]["query"] for variable in variables):
        found = re.fullmatch(r"label_values\((?P<of>.*), (?P<label>\w+)\)|query_result\((?P<result>.*)\)", text)
        assert ask(found["result"] or f"group by ({found['label']}) ({found['of']})", **PICKED), text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variable", ["contract", "slice", "kernel_train", "kernel_inference"])
def test_what_is_not_picked_is_not_shown(ask, boards, name, variable):
    """Counts are zero where there is none."""
    shown = [
        (panel["title"], text)
        for panel, text in targets(boards[name])
        if re.search(rf"\${variable}\b", text) and any(ask(text, **PICKED, **{variable: "none"}))
    ]
    assert shown == []


@pytest.mark.parametrize("name", ["overview", "health"])
def test_without_an_evaluator_nothing_is_zero(ask, boards, name):
    """A minute and a half after the last evaluation no count says anything, and the first tile how old all of it is.

    An evaluator of another contract lives: it says something where only that is picked. One that died 5 s ago does not.
    """
    tiles = [(panel, text) for panel, text in targets(boards[name]) if panel["type"] == "stat"]
    for panel, _ in tiles:
        shown = panel["fieldConfig"]["defaults"]
        assert shown["noValue"] == "unknown"
        # Without it Grafana shows no value on the colour of the lowest threshold, which is green here.
        (null,) = (mapping["options"] for mapping in shown["mappings"] if mapping["type"] == "special")
        assert null == {"match": "null+nan", "result": {"text": "unknown", "color": "#808080"}}
    said = {panel["title"]: ask(text, END + 90, "80s") for panel, text in tiles if panel["title"] != "Measured share"}
    assert said.pop("Evaluated") == [90.0]
    assert said
    assert not any(said.values())
    other = {panel["title"]: ask(text, END + 90, contract="other") for panel, text in tiles}
    assert other["Evaluated"] == [10.0]
    assert len(other["Points used"]) == 1
    assert [panel["title"] for panel, text in tiles if ask(text, END + 90, contract="gone")] == ["Evaluated"]


def test_without_recorders_nothing_that_they_count_is_zero(ask):
    """Where Prometheus scrapes the evaluator alone."""
    kinds = ("kc.input.invalid", "kc.recorder.dropped", "kc.recorder.export.failures")
    assert [ask(queries.increase(kind).replace("_total", "_never")) for kind in kinds] == [[0.0]] * 3
    asked = [queries.increase(kind).replace("_total", "_never").replace("_sampling", "_never") for kind in kinds]
    assert [ask(text) for text in asked] == [[]] * 3


def test_what_failed_first_counts(ask):
    """A series that begins within the range begins with a count."""
    assert ask(queries.increase("kc.input.invalid"), span="600s") == [29.0]


def test_points_that_recorders_send_of_themselves_are_not_told_as_unused(ask, boards):
    (text,) = (text for panel, text in targets(boards["health"]) if panel["title"] == "Points not used")
    assert ask(text) == ask(queries.rate("kc.evaluator.points", (), 'kc_outcome="late"'))


def test_numbers_are_those_that_were_sent(ask):
    """Of lowest margins, worst verdicts, means of a histogram and what is derived from one."""
    assert set(ask(queries.margin_share())) == {1.0 / 0.5}
    assert set(ask(queries.VERDICTS)) == {3.0}
    assert set(ask(queries.SEVERITY)) == {3.0}
    assert set(ask(queries.action_bits())) == {2.0**5}
    assert ask(queries.mean("tv_seq")) == [pytest.approx(0.1)]
    assert ask(queries.scaled("abs_log_ratio", "clip_budget_share")) == [pytest.approx(0.1)]
    assert ask(queries.quantile(1.0, queries.histogram("weights_lag"))) == [pytest.approx(2.0 ** (-53 / 16))]
    assert ask(queries.increase("kc.input.invalid")) == [pytest.approx(29.0, rel=0.1)]
