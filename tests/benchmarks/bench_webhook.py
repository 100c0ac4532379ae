"""From the export that breaks a limit to its webhook: `python tests/benchmarks/bench_webhook.py [BREACHES]`.

A real `kc-otel serve` with its default tick of a second and, as messages about different contracts wait for nothing,
`--group-wait 0s`; sixty contracts, of which one after the other breaks at a random moment, over HTTP, on a log that is
synced before it acknowledges. Clocked is from before the export is sent until the webhook's body has been received and
its signature verified.

Beside it, in the same run, a Prometheus scrapes the evaluator's `/metrics` and runs the generated rules, and an
Alertmanager sends on what fires, both with the intervals that they have unless they are told otherwise (a minute
between scrapes; 30 s until a group is told; the rules' own 15 s). Clocked is the same export until Alertmanager's
message. Without Debian's packages of the two only the evaluator is clocked.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import yaml

from kc_otel.contract.load import load
from kc_otel.generate.prometheus.alerting_rules import rule_file
from tests.integration.conftest import Evaluator, Pager, paging
from tests.integration.test_overload import paged
from tests.tools import debian
from tests.tools.load import HEADERS, message
from tests.tools.servers import free_address, running, sink

LASTING_MINUTES = 5
"""What is broken is still broken when Prometheus looks."""
WAIT_SECONDS = 240.0
"""Seconds in which Alertmanager has to have said the last of them."""


def breaches(count: int, folder: Path, *, beside: bool) -> tuple[list[float], list[float]]:
    """Seconds from each of so many breaches to its webhook, and to Alertmanager's message where it runs beside."""
    names = [f"policy-{number}" for number in range(count)]
    contracts = folder / "contracts"
    contracts.mkdir()
    for name in names:
        (contracts / f"{name}.yaml").write_text(paged(name, LASTING_MINUTES))
    sent: dict[str, float] = {}
    told: dict[str, float] = {}
    own: list[float] = []

    def notified(body: bytes, _headers: Mapping[str, str]) -> int:
        now = time.monotonic()
        for alert in json.loads(body)["alerts"]:
            told.setdefault(alert["labels"].get("contract", ""), now)
        return 200

    with ExitStack() as stack:
        pager = Pager()
        pager.url = stack.enter_context(sink(pager.take))
        options = ("--tick", "1", "--group-wait", "0s")
        evaluator = Evaluator(contracts, folder / "state.sqlite", paging(pager.url), *options)
        stack.callback(evaluator.stop)
        if beside:
            stack.enter_context(
                _both(evaluator.api, sorted(contracts.iterdir()), stack.enter_context(sink(notified)), folder)
            )
            time.sleep(60.0)  # it has scraped once: nobody asks for its first minute
        client = stack.enter_context(httpx.Client(timeout=30))
        for name in names:
            time.sleep(random.uniform(0.0, 1.0))
            body = message(["v1"], time.time_ns() - 10**9, 1000, [name])
            before, sent[name] = len(pager.bodies), time.monotonic()
            answer = client.post(f"{evaluator.http}/v1/metrics", content=body, headers=HEADERS)
            assert answer.status_code == 200
            while len(pager.bodies) == before:
                assert time.monotonic() - sent[name] < 60, evaluator.log
                time.sleep(0.002)
            own.append(time.monotonic() - sent[name])
        end = time.monotonic() + WAIT_SECONDS
        while beside and not told.keys() >= sent.keys():
            assert time.monotonic() < end, f"Alertmanager said {len(told)} of {count}"
            time.sleep(0.1)
    return own, [told[name] - began for name, began in sent.items()] if beside else []


@contextmanager
def _both(api: str, contracts: Sequence[Path], receiver: str, folder: Path) -> Iterator[None]:
    """Prometheus and Alertmanager with their own intervals, the generated rules, and a receiver of what fires."""
    manager, prometheus = free_address(), free_address()
    for path in contracts:
        (folder / f"{path.stem}.rules.yaml").write_text(rule_file(load(path)).text)
    told = {"name": "receiver", "webhook_configs": [{"url": receiver, "send_resolved": False}]}
    routes = {"route": {"receiver": "receiver", "group_by": ["contract"]}, "receivers": [told]}
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(routes))
    scraped = {"job_name": "kc-otel", "static_configs": [{"targets": [api.removeprefix("http://")]}]}
    config = {
        "rule_files": ["*.rules.yaml"],
        "scrape_configs": [scraped],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    commands = {
        manager: [*debian.alertmanager(), f"--storage.path={folder / 'alertmanager'}", "--cluster.listen-address="],
        prometheus: [debian.find("prometheus"), f"--storage.tsdb.path={folder / 'prometheus'}"],
    }
    with ExitStack() as stack:
        for (address, command), name in zip(commands.items(), ("alertmanager", "prometheus"), strict=True):
            command += [f"--config.file={folder / name}.yaml", f"--web.listen-address={address}"]
            stack.enter_context(running(command, folder / f"{name}.log", f"http://{address}/-/ready"))
        yield


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    try:
        debian.find("prometheus")
        debian.alertmanager()
        beside = True
    except debian.UnavailableError as error:
        print(f"without Prometheus and Alertmanager: {error}")
        beside = False
    with tempfile.TemporaryDirectory() as folder:
        own, alertmanager = breaches(count, Path(folder), beside=beside)
    for who, found in (("the evaluator's webhook", own), ("Alertmanager's message", alertmanager)):
        if found:
            median, p99 = np.quantile(found, [0.5, 0.99])
            print(f"{len(found)} breaches to {who}: median {median:.2f} s, p99 {p99:.2f} s, slowest {max(found):.2f} s")


if __name__ == "__main__":
    main()
