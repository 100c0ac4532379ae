"""What was exported, as Prometheus has it: series for remote write, from OTLP requests and from `/metrics` pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from tests.tools.panel_evaluators import Moment
from tests.tools.panel_traffic import Recorded, metrics
from tests.tools.remote_write import Series, of_request

JOB = "kc-otel"
Key = tuple[tuple[str, str], ...]


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
