"""Latency histograms of an engine's metrics page under OpenTelemetry's names, for `kc-otel scrape`."""

from __future__ import annotations

import logging
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.metrics import export as sdk

from kc_otel._extras import extra
from kc_otel.client.credentials import parts_of

LATENCIES: Final[Mapping[str, str]] = {
    "vllm:time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "vllm:request_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "vllm:e2e_request_latency_seconds": "gen_ai.server.request.duration",
}
"""Names of an engine's histograms, and what they are by OpenTelemetry's semantic conventions; all in seconds."""
_log: Final = logging.getLogger("kc_otel")
_MAX_RESPONSE_BYTES: Final = 16 << 20
_TIMEOUT_SECONDS: Final = 10.0
_Labels = tuple[tuple[str, str], ...]


class EngineLatency:
    """Latency from an engine's metrics page, read for each export; a page that cannot be read is logged once."""

    def __init__(self, url: str, read: Callable[[str], str] | None = None) -> None:
        parts_of(url, "a page", "http://127.0.0.1:8000/metrics")
        with extra("serve", "reading an engine's metrics"):
            from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - an extra
        self._families = text_string_to_metric_families
        self._url = url
        self._read = read or _over_http
        self._failed = False

    def collect(self, now: int) -> Sequence[sdk.Metric]:
        """The histograms as of now, unix nanoseconds, cumulative; none where the page cannot be read."""
        try:
            families = list(self._families(self._read(self._url)))
            found = list(self._metrics({family.name: family for family in families}, now))
        except (OSError, ValueError, KeyError) as error:
            if not self._failed:
                _log.warning("%s: no latency can be read: %s", self._url, error)
            self._failed = True
            return ()
        if not found and not self._failed:
            _log.warning("%s: has none of %s; is it vLLM's page?", self._url, ", ".join(LATENCIES))
        self._failed = not found
        return found

    def exported(self, error: object | None) -> None:
        """Log an export that did not arrive."""
        if error is not None:
            _log.warning("latencies were not exported: %s", error)

    def _metrics(self, families: Mapping[str, Any], now: int) -> Iterator[sdk.Metric]:
        process = families.get("process_start_time_seconds")
        start = min(int(process.samples[0].value * 1e9), now) if process and process.samples else 0  # unknown
        for theirs, name in LATENCIES.items():
            if theirs not in families:
                continue
            points = [
                _point(labels, samples, start, now) for labels, samples in _by_labels(families[theirs].samples).items()
            ]
            data = sdk.Histogram(points, sdk.AggregationTemporality.CUMULATIVE)
            yield sdk.Metric(name, f"{theirs} of the engine.", "s", data)


def _point(labels: _Labels, samples: Mapping[str, Any], start: int, now: int) -> sdk.HistogramDataPoint:
    """A cumulative point; Prometheus counts each bucket together with those below it."""
    below = sorted(samples["bucket"])
    counts = [count for _, count in below]
    attributes = dict(labels)
    if model := attributes.get("model_name"):
        attributes["gen_ai.request.model"] = model
    return sdk.HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=int(counts[-1]),
        sum=float(samples["sum"]),
        bucket_counts=[int(count - before) for before, count in zip([0.0, *counts], counts, strict=False)],
        explicit_bounds=[bound for bound, _ in below[:-1]],
        min=None,  # type: ignore[arg-type]  # Prometheus has no extremes, and OTLP's are optional
        max=None,  # type: ignore[arg-type]
        exemplars=[],
    )


def _by_labels(samples: Sequence[Any]) -> dict[_Labels, dict[str, Any]]:
    found: defaultdict[_Labels, dict[str, Any]] = defaultdict(lambda: {"bucket": []})
    for sample in samples:
        if sample.name.endswith("_bucket"):
            found[_labels(sample.labels)]["bucket"].append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            found[_labels(sample.labels)]["sum"] = sample.value
    return {labels: kinds for labels, kinds in found.items() if kinds["bucket"]}


def _labels(labels: Mapping[str, str]) -> _Labels:
    return tuple(sorted((name, value) for name, value in labels.items() if name != "le"))


def _over_http(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - http or https
        return bytes(answer.read(_MAX_RESPONSE_BYTES)).decode("utf-8", "replace")
