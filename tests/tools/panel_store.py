"""A real Prometheus that has what recorders and evaluators exported, and what is behind it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kc_otel.contract.model import Contract
from tests.tools.panel_evaluators import Moment, judge
from tests.tools.panel_traffic import STEP, Recorded, metrics, record
from tests.tools.panel_world import World
from tests.tools.remote_write import HEADERS, Series, body, of_request
from tests.tools.servers import free_address, running, sink

JOB = "kc-otel"
END = 1_760_000_000
"""Unix time of the last export; nothing that is asked depends on the present."""
SCRAPED = 10
"""Seconds between two scrapes, as the provisioned data source says."""
_RANGE = 6 * 3600

Key = tuple[tuple[str, str], ...]


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
