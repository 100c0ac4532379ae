"""A real Prometheus that has what recorders and evaluators exported, and what is behind it.

The evaluators take played exports over OTLP/HTTP and are told the time. What is behind the answers of dashboards'
queries are their objects, and the recorders' arrays.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from kc_otel.client.webhooks import Secret
from kc_otel.contract.model import Contract
from kc_otel.judge.otlp.requests import ExportResult
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Verdict
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import open_state
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from tests.tools.deliveries import drain
from tests.tools.panel_traffic import ENGINE, EXPORTS, STEP, TRAFFIC, Recorded, metrics, record
from tests.tools.receivers import http_app
from tests.tools.remote_write import HEADERS, Series, body, of_request
from tests.tools.servers import free_address, running, sink

Labels = frozenset[tuple[str, str]]
Rows = list[tuple[dict[str, str], Any]]
LOOKBACK = 300
"""Seconds for which Prometheus takes a series to have its last value."""
CELL = ("kc_contract", "kc_clause", "kc_slice", "kc_kernel_train", "kc_kernel_inference")
VARIABLES = {name: f"kc_{name}" for name in ("contract", "slice", "kernel_train", "kernel_inference")}
JOB = "kc-otel"
END = 1_760_000_000
"""Unix time of the last export; nothing that is asked depends on the present."""
SCRAPED = 10
"""Seconds between two scrapes, as the provisioned data source says."""
_RANGE = 6 * 3600

Key = tuple[tuple[str, str], ...]
TICK = 10
"""Seconds between two evaluations; each is followed by a look at the page."""
_OTLP = {"content-type": "application/x-protobuf"}


@dataclass(frozen=True)
class Moment:
    at: int
    page: bytes
    cells: tuple[tuple[Verdict, float], ...]


class _Told(Core):
    """An evaluator that takes what arrives at the time that is played."""

    clock = 0.0

    def metrics(self, request: Any) -> ExportResult:
        return self.evaluator.ingest_metrics(request, self.clock)


def judge(contracts: Sequence[Contract], recorded: Recorded, begin: int, late: int, pager: str) -> Iterator[Moment]:
    """Judge, route, escalate and promote from `begin` to the last export, Unix seconds; a moment per evaluation.

    What happens is about the first contract. Exports arrive `late` seconds late; the only endpoint is `pager`.
    """
    requests = Counter()
    with closing(open_state(None)) as connection:
        core = _Told(contracts, connection, external_url="http://evaluator", now=begin)
        endpoint = WebhookEndpoint("pager", pager, (Secret(bytes(range(32))),), allow_private=True)
        dispatcher = Dispatcher(core.outbox, {"pager": endpoint}, clock=lambda: core.clock)
        api = make_api(core, lambda: read(core, requests, dispatcher.attempts), Changes(), "0")
        otlp = TestClient(http_app(core, counts=requests))  # it has no lifespan to enter
        with TestClient(api) as reader:
            for now in range(begin, recorded.end + 1, TICK):
                core.clock = now
                _receive(otlp, recorded, now - late)
                core.tick(now)
                core.evaluator.faults.counts[contracts[0].name] += 3
                if now == recorded.end - 2 * STEP:
                    _promote(core, contracts[0].name, recorded)
                asyncio.run(_deliver(dispatcher))
                yield Moment(
                    at=now,
                    page=reader.get("/metrics").content,
                    cells=tuple((verdict, since) for verdict, since, _ in core.history.cells()),
                )


def _receive(otlp: TestClient, recorded: Recorded, at: int) -> None:
    """What was exported at a time: by every recorder, the last of them twice, and with it what nobody can read."""
    arriving = [export for export in recorded.exports if export.at == at and export.recorder != ENGINE]
    for export in (*arriving, *arriving[-1:]):
        content = export.request.SerializeToString()
        assert otlp.post("/v1/metrics", content=content, headers=_OTLP).status_code == 200
    if arriving:
        assert otlp.post("/v1/metrics", content=b"\xff", headers=_OTLP).status_code == 400


def _promote(core: _Told, contract: str, recorded: Recorded) -> None:
    """One version is rolled back; the next is forced into the canary."""
    back, on = (recorded.kernels[name][1].fingerprint for name in ("int4", "bf16"))
    core.promotions.start(contract, back, "ada", core.clock)
    core.promotions.tell(contract, back, "rollback", "ada", "it drifts", core.clock)
    core.promotions.start(contract, on, "ada", core.clock)
    core.promotions.tell(contract, on, "force", "ada", "it has been looked at", core.clock, stage=Stage.CANARY)


async def _deliver(dispatcher: Dispatcher) -> None:
    await drain(dispatcher)
    await dispatcher.aclose()


@dataclass(frozen=True)
class World:
    """What is behind the answers to queries `at` a Unix time; what is recorded is about the first contract.

    `picked` is a regular expression by variable, as it is put into queries; `rate` and `range` are the seconds of
    `$__rate_interval` and `$__range`.
    """

    contracts: tuple[Contract, ...]
    recorded: Recorded
    evaluators: Mapping[str, Sequence[Moment]]
    at: float
    picked: Mapping[str, str]
    rate: float
    range: float

    @property
    def contract(self) -> Contract:
        return self.contracts[0]

    def but(self, **changes: Any) -> World:
        """The world at another time, or with something else picked."""
        return replace(self, **changes)

    def now(self) -> Iterator[Moment]:
        """The last moment of each evaluator."""
        for moments in self.evaluators.values():
            if seen := [moment for moment in moments if self.at - LOOKBACK < moment.at <= self.at]:
                yield seen[-1]

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Whether a series is picked; a variable whose label the series has not says nothing."""
        picks = ((label, self.picked[name]) for name, label in VARIABLES.items() if name in self.picked)
        return all(label not in labels or re.fullmatch(regex, labels[label]) for label, regex in picks)

    def cells(self, of: Callable[[Verdict, float], float]) -> Rows:
        """A number of each picked cell from its verdict and since when it has it; those that are not known are none."""
        found: Rows = []
        for moment in self.now():
            for verdict, since in moment.cells:
                labels = {f"kc_{name}": text for name, text in verdict.cell._asdict().items()}
                if self.takes(labels) and not math.isnan(value := float(of(verdict, since))):
                    found.append((labels, value))
        return found

    def log_ratios(self) -> Rows:
        """Log P - log Q of each picked slice and recorder after the first export of the rate's interval."""
        inside = [k for k in range(EXPORTS) if self.at - self.rate < self.recorded.time_of(k) <= self.at]
        found: Rows = []
        for name, batches in self.recorded.batches.items():
            pair = (kernel.fingerprint for kernel in self.recorded.kernels[name])
            of = dict(zip(CELL[3:], pair, strict=True)) | {"kc_contract": self.contract.name}
            values = np.concatenate([batches[k].log_ratio for k in inside[1:]])
            found += [(of | {"kc_slice": slice}, values) for slice in TRAFFIC[name].slices]
        return [row for row in found if self.takes(row[0])]


def by(names: Iterable[str], rows: Iterable[tuple[Any, Any]], how: Callable[[Any], Any] = max) -> dict[Labels, Any]:
    """Rows aggregated by labels; an empty label is none."""
    names, groups = tuple(names), dict[Labels, list]()
    for labels, value in rows:
        key = frozenset((name, labels[name]) for name in names if labels.get(name))
        groups.setdefault(key, []).append(value)
    return {key: how(values) for key, values in groups.items()}


@dataclass(frozen=True)
class Store:
    """A Prometheus that has everything, through a client of its API, and what is behind it; nothing is picked yet."""

    client: httpx.Client
    world: World

    def ask(self, expression: str, world: World) -> list[dict[str, Any]]:
        """Result of an instant query with its variables filled in."""
        answer = self.client.get("/query", params={"query": filled(expression, world), "time": world.at}).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]


def filled(expression: str, world: World) -> str:
    """A query with its variables filled in, as Grafana does."""
    text = expression.replace("$__range", f"{world.range:.0f}s").replace("$__rate_interval", f"{world.rate:.0f}s")
    for name, value in world.picked.items():
        text = re.sub(rf"\$({name}\b|{{{name}}})", lambda _, value=value: value, text)
    # What is no variable is left as it is: the groups of expressions in `label_replace`.
    assert not re.search(r"\$[^1]", text), text
    return text


def rate_interval(target: Mapping[str, Any], world: World) -> float:
    """Seconds of `$__rate_interval` while the range is short: four smallest steps of the query, or four scrapes.

    Source: Grafana documentation, Prometheus data source, `$__rate_interval`.
    """
    return 4.0 * float(filled(target.get("interval", f"{SCRAPED}s"), world).removesuffix("s"))


@contextmanager
def played(program: str, contracts: Sequence[Contract], folder: Path) -> Iterator[Store]:
    """Record for the first contract, judge, and write; dashboards show six hours."""
    recorded = record(contracts[0], END)
    with sink(lambda _body, _headers: 200) as pager:
        # The second evaluator starts when the first has been there for a while, and hears of everything later.
        starts = {"first:8080": (END - 7 * STEP, 0), "second:8080": (END - 110, STEP)}
        evaluators = {name: list(judge(contracts, recorded, *when, pager)) for name, when in starts.items()}
    series = [*of_recorders(recorded), *(sample for name in starts for sample in of_pages(name, evaluators[name]))]
    (folder / "config.yml").write_text("{}")
    own = free_address()
    command = [
        program,
        f"--config.file={folder / 'config.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={own}",
        "--web.enable-remote-write-receiver",
        "--enable-feature=native-histograms,exemplar-storage",
    ]
    with (
        running(command, folder / "log", f"http://{own}/-/ready"),
        httpx.Client(base_url=f"http://{own}/api/v1", timeout=10, trust_env=False) as client,
    ):
        written = client.post("/write", content=body(series), headers=HEADERS)
        assert written.status_code == 204, written.text
        yield Store(client, World(tuple(contracts), recorded, evaluators, END, {}, 0.0, _RANGE))


def of_recorders(recorded: Recorded) -> list[Series]:
    """Every histogram, counter and gauge; each recorder is an `instance`, as a receiver of OTLP makes it one."""
    histograms: dict[Key, list] = {}
    numbers: dict[Key, list] = {}
    for export in recorded.exports:
        instance = {"instance": export.recorder}
        for sample in of_request(export.request):
            histograms.setdefault(_key({**sample.labels, **instance}), []).extend(sample.histograms)
        for name, kind, point in metrics(export.request):
            if kind != "exponential_histogram":
                labels = {item.key.replace(".", "_"): item.value.string_value for item in point.attributes}
                labels["__name__"] = name.replace(".", "_") + ("_total" if kind == "sum" else "")
                value = point.as_double if point.WhichOneof("value") == "as_double" else float(point.as_int)
                numbers.setdefault(_key({**labels, **instance}), []).append((1000 * export.at, value))
    return [
        *(Series(dict(key), histograms=found) for key, found in histograms.items()),
        *(Series(dict(key), samples=found) for key, found in numbers.items()),
    ]


def of_pages(instance: str, moments: Sequence[Moment]) -> list[Series]:
    """Every series of an evaluator's pages, as if scraped: one that is gone from a page ends there."""
    found: dict[Key, list[tuple[int, float]]] = {}
    before: set[Key] = set()
    for moment in moments:
        page = {_key({**labels, "job": JOB, "instance": instance}): value for labels, value in parsed(moment.page)}
        for key, value in page.items():
            found.setdefault(key, []).append((1000 * moment.at, value))
        for key in before - page.keys():
            found[key].append((1000 * moment.at, math.nan))
        before = set(page)
    return [Series(dict(key), samples=samples) for key, samples in found.items()]


def parsed(page: bytes) -> Iterator[tuple[dict[str, str], float]]:
    """(labels with the name, value) of every sample of a page; an empty label is none."""
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            yield {"__name__": sample.name, **{key: text for key, text in sample.labels.items() if text}}, sample.value


def _key(labels: Mapping[str, str]) -> Key:
    return tuple(sorted(labels.items()))
