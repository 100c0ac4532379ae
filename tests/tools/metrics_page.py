"""A page like the evaluator's and the recorders', with every metric of the registry and one cell that is broken."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kc_otel.contract import Contract
from kc_otel.contract.registry import METRICS, Instrument, Metric
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.names import label_name, prometheus_name

BROKEN = ("token-tv", "code")
PAIRS = (("x", "x"), ("x", "y"))
"""Training and inference kernel versions; what is broken is broken with the first inference kernel alone."""
ACTIONS = ("halt", "route:train-kernel", "hold-promotion", "notify", "webhook:pager")
VALUES = {
    "kc.verdict.since": 1.7e9,
    "kc.bound.estimate": 0.006,
    "kc.bound.lower": 0.005,
    "kc.bound.upper": 0.007,
    "kc.bound.limit": 0.004,
}


def page(policy: Contract, scrapes: int) -> str:
    """Every metric of the registry in the text format, one cell broken; counters grow with each scrape."""
    lines = []
    for metric in METRICS.values():
        if metric.instrument is Instrument.EXPONENTIAL_HISTOGRAM:
            continue
        name = prometheus_name(metric)
        kind = "counter" if metric.instrument is Instrument.COUNTER else "gauge"
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {kind}"]
        for labels in label_sets(policy, metric):
            value = VALUES.get(metric.name, 1.0)
            if metric.name in {"kc.verdict", "kc.rule.status"}:
                broken = (labels["kc_clause"], labels["kc_slice"]) == BROKEN and labels["kc_kernel_inference"] == "x"
                value = (Status.FAIL if broken else Status.PASS).code
            if kind == "counter":
                value = 10 * scrapes
            written = ",".join(f'{key}="{value}"' for key, value in labels.items())
            lines.append(f"{name}{{{written}}} {value}")
    return "\n".join(lines) + "\n"


def label_sets(policy: Contract, metric: Metric) -> Iterator[dict[str, str]]:
    """The series of a metric, by their labels."""
    known = {
        "kc.contract": [policy.name],
        "kc.clause": [clause.id for clause in policy.clauses],
        "kc.slice": ["all", *policy.slices, "other"],
        "kc.action": list(ACTIONS),
        "kc.severity": ["warning", "critical"],
        "kc.outcome": ["accepted"],
        "kc.route.kernel": ["train-kernel"],
    }
    pairs = PAIRS if "kc.kernel.train" in metric.attributes else (("x", "x"),)
    for train, inference in pairs:
        own = {**known, "kc.kernel.train": [train], "kc.kernel.inference": [inference]}
        values = [own.get(attribute, ["x"]) for attribute in metric.attributes]
        for chosen in itertools.product(*values):
            yield dict(zip(map(label_name, metric.attributes), chosen, strict=True))


@contextmanager
def serve(policy: Contract) -> Iterator[str]:
    """Address of a server whose `/metrics` is the page."""
    scrapes = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal scrapes
            scrapes += 1
            body = page(policy, scrapes).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
