"""A fleet's incident from end to end: a kernel version breaks 45 of 60 slices, the evaluator is killed meanwhile."""

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract.load import load
from tests.tools.chromium import Chromium
from tests.tools.servers import Answer, answering, free_address, running
from tests.tools.waiting import eventually

from .conftest import TRAIN, Meanwhile, command, logprobs, wrong

pytestmark = pytest.mark.slow

SLICES = [f"team-{index:02d}" for index in range(60)]
FIRST, DRIFTED = SLICES[:3], SLICES[:45]
CONTRACT = f"""\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: fleet, version: 1, owner: serving}}
kernels:
  train: {{engine: torch}}
  inference: {{engine: vllm}}
assumptions: {{reward_range: [0, 1]}}
slices:
{"".join(f"  {name}: {{where: {{team: {name}}}}}{chr(10)}" for name in SLICES)}
statistical:
  - {{id: token-tv, metric: tv_token, unit: token, limit: 0.02}}
observability: {{window: 20s, long_window: 40s, min_samples: 500, heartbeat: 10s}}
escalation:
  - {{on: fail, severity: critical, do: [{{route: train-kernel}}, {{webhook: pager}}, {{webhook: chat}}]}}
  - {{on: no-data, for: 10s, severity: warning, do: [{{webhook: pager}}, {{webhook: chat}}]}}
"""
GOOD = kc_otel.Kernel("vllm", version="0.31", dtype="bfloat16")
BAD = kc_otel.Kernel("vllm", version="0.32", dtype="fp8")
BOARD = Path(__file__).parents[2] / "dashboards" / "grafana" / "dashboards" / "overview.json"
PICTURES = "KC_OTEL_PICTURES"
"""Variable with the folder that pictures for the handbook are written to."""
WIDER = """[...document.querySelectorAll('.card, .incident, .grid-box, .notice, .warning, section, dialog[open] > *')]
  .filter((one) => one.offsetParent !== null && one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.className || one.id)"""
SLOW = 90.0
"""Seconds that a page may take on a busy machine: it asks the less often, the slower it is answered."""
CALM, DRIFT = 0.005, 0.2
"""Standard deviations of a token's log ratio."""


class Limited:
    """A receiver that takes so many requests a minute, a few at once, and answers 429 to others, as to the first."""

    def __init__(self, per_minute: float, burst: float) -> None:
        self.url = ""
        self.taken: list[dict[str, Any]] = []
        self.refused = 0
        self._per_minute, self._burst = per_minute, burst
        self._lock, self._tokens, self._then = threading.Lock(), 0.0, 0.0

    def answer(self, _path: str, _headers: Mapping[str, str], body: bytes) -> Answer:
        with self._lock:
            now = time.monotonic()
            # Others have used up what there was when the first request comes.
            earned = (now - self._then) * self._per_minute / 60 if self._then else -math.inf
            self._tokens, self._then = max(0.0, min(self._burst, self._tokens + earned)), now
            if self._tokens >= 1:
                self._tokens -= 1
                self.taken.append(json.loads(body))
                return 202, {}, b""
            self.refused += 1
            return 429, {"retry-after": "1"}, b""


class Fleet(Meanwhile):
    """Sixty teams' traffic through one kernel version, measured on in its shadow where it is routed away."""

    def __init__(self, contract: Path, http: str, router: Router) -> None:
        exporter = OTLPMetricExporter(endpoint=f"{http}/v1/metrics", timeout=20)
        self.recorder = kc_otel.Recorder(
            contract, train=TRAIN, inference=GOOD, metric_exporter=exporter, export_interval=1.0, sampling=1.0
        )
        self._router, self._kernel, self._rng = router, GOOD, np.random.default_rng(0)
        self.drifted: list[str] = []
        self._between = threading.Lock()
        """A roll-out is between two batches: what one kernel computed is never said of the other."""
        super().__init__(1.0)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.recorder.shutdown()

    def roll_out(self, kernel: kc_otel.Kernel) -> None:
        with self._between:
            self._kernel = kernel
            self.recorder.rollout(inference=kernel)

    def act(self) -> None:
        for team in SLICES:
            with self._between:
                self._batch(team)

    def _batch(self, team: str) -> None:
        self._router.choose("fleet", {"team": team}, inference_version=self._kernel.fingerprint)
        drift = DRIFT if self._kernel is BAD and team in self.drifted else CALM
        self.recorder.compare(*logprobs(self._rng, 4, 64, drift), attributes={"team": team})


@pytest.fixture
def contract_file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(CONTRACT)
    return path


@pytest.fixture
def pagerduty() -> Iterator[Limited]:
    """120 events a minute."""
    server = Limited(120, 4)
    with answering(server.answer) as server.url:
        yield server


@pytest.fixture
def slack() -> Iterator[Limited]:
    """One message a second."""
    server = Limited(60, 1)
    with answering(server.answer) as server.url:
        yield server


def until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    eventually(true, seconds, 0.2, lambda: f"not yet: {what}")


def told_of(pagerduty: Limited) -> set[str]:
    fired = (event["payload"]["custom_details"]["cells"] for event in pagerduty.taken if "payload" in event)
    return {cell["slice"] for cells in fired for cell in cells}


@contextmanager
def scraped(program: str, api: str, folder: Path) -> Iterator["Overview"]:
    """The board on a Prometheus that scrapes the evaluator."""
    config, own = folder / "prometheus.yml", free_address()
    job = {"job_name": "evaluator", "static_configs": [{"targets": [api.removeprefix("http://")]}]}
    config.write_text(yaml.safe_dump({"scrape_configs": [job | {"scrape_interval": "1s", "scrape_timeout": "1s"}]}))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (
        running([*command, f"--web.listen-address={own}"], folder / "log", f"http://{own}/-/ready"),
        httpx.Client(base_url=f"http://{own}/api/v1", timeout=20, trust_env=False) as client,
    ):
        yield Overview(client)


class Overview:
    """Grafana's first board by its queries; nothing is picked on it."""

    def __init__(self, client: httpx.Client) -> None:
        board = json.loads(BOARD.read_text())
        self._client = client
        self._queries = {
            panel["title"]: panel["targets"][0]["expr"] for panel in board["panels"] if panel.get("targets")
        }
        self._queries |= {mark["name"]: mark["expr"] for mark in board["annotations"]["list"] if "expr" in mark}

    def rows(self, title: str) -> list[dict[str, Any]]:
        """What a panel's first query finds."""
        query = re.sub(r'=~"\$\w+"', '=~".*"', self._queries[title]).replace("$__range", "300s")
        answer = self._client.get("/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def tile(self, title: str) -> int | None:
        """The number on a tile; None for unknown."""
        rows = self.rows(title)
        return int(float(rows[0]["value"][1])) if rows else None


def look(browser: Chromium, api: str, incident: str, pictures: Path | None) -> None:
    """What a person at the page sees: a headline, rows that stay, what passes folded, nothing wider than its card."""
    names = "[...document.querySelectorAll('.rows .grid-row')].map((row) => row.dataset.key)"
    focused = "document.activeElement.closest('.grid-row')?.dataset.key"
    numbers = "document.querySelector('#health-body').innerText"
    browser.open(api)
    browser.wait(
        "document.querySelectorAll('.rows .grid-row').length >= 40 && document.querySelector('.spark .chart')", SLOW
    )
    assert browser.evaluate("document.querySelector('h1').textContent") == "1 promise is broken on 45 slices"
    assert browser.evaluate("document.querySelectorAll('.incident').length") == 1
    assert re.search(r"15 (that|slices) pass", browser.evaluate("document.querySelector('.more').textContent"))
    browser.evaluate("document.querySelectorAll('.rows .grid-row')[12].querySelector('.mark').focus()")
    before, held, then = browser.evaluate(names), browser.evaluate(focused), browser.evaluate(numbers)
    for _ in range(2):
        browser.wait(f"{numbers} !== {json.dumps(then)}", SLOW)
        then = browser.evaluate(numbers)
    assert (browser.evaluate(names), browser.evaluate(focused)) == (before, held)
    for dark, width in ((False, 1200), (True, 1200), (False, 390)):
        browser.open(api, dark=dark, width=width)
        browser.wait("document.querySelector('.spark .chart')", SLOW)
        assert wrong(browser) == []
        assert browser.evaluate(WIDER) == []
        take(browser, pictures, f"fleet-{'dark' if dark else 'light' if width > 390 else 'phone'}.png")
    for width in (1200, 390):
        browser.open(f"{api}/#/incident/{incident}", width=width)
        browser.wait("document.querySelectorAll('#incident .onsets tbody tr').length === 46", SLOW)
        claims = browser.evaluate("document.querySelector('#incident-claims').textContent")
        assert "A verdict covers only the measured traffic" in claims
        assert "expected time between false alarms" in claims
        assert wrong(browser) == []
        assert browser.evaluate(WIDER) == []
        take(browser, pictures, f"incident-{'light' if width > 390 else 'phone'}.png")


def take(browser: Chromium, pictures: Path | None, name: str) -> None:
    if pictures is not None:
        browser.screenshot(pictures / name)


def shown(*arguments: str) -> str:
    done = command(*arguments, COLUMNS="80", NO_COLOR="1")
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout


def test_a_fleet_is_one_incident_and_one_page(browser, serve, pagerduty, slack, contract_file, program, tmp_path):
    """Forty-five slices, a killed evaluator, receivers that refuse: one person is paged once, and reads one story."""
    endpoints = {
        "KC_OTEL_WEBHOOK_PAGER_URL": pagerduty.url,
        "KC_OTEL_WEBHOOK_PAGER_FORMAT": "pagerduty",
        "KC_OTEL_WEBHOOK_PAGER_SECRET": "routing-key-of-tests",
        "KC_OTEL_WEBHOOK_CHAT_URL": slack.url,
        "KC_OTEL_WEBHOOK_CHAT_FORMAT": "slack",
        "KC_OTEL_WEBHOOK_CHAT_ALLOW_PRIVATE": "1",
    }
    pictures = Path(os.environ[PICTURES]) if PICTURES in os.environ else None
    grouping = ("--group-wait", "2s", "--group-interval", "4s")
    evaluator = serve(*grouping, **endpoints)
    ports = [evaluator.http.rsplit(":", 1)[1], evaluator.api.rsplit(":", 1)[1]]

    def incidents(*, lasting: bool) -> list[dict[str, Any]]:
        found = evaluator.get("/api/v1/incidents")["incidents"]
        return [entry for entry in found if lasting is (entry["until"] is None)]

    def statuses(kernel: kc_otel.Kernel) -> dict[str, str]:
        found = evaluator.get("/api/v1/verdicts")["verdicts"]
        return {cell["slice"]: cell["status"] for cell in found if cell["kernel_inference"] == kernel.fingerprint}

    with (
        scraped(program("prometheus"), evaluator.api, tmp_path) as overview,
        Router(evaluator.api, contracts=[load(contract_file)], wait=1.0) as router,
        Fleet(contract_file, evaluator.http, router) as fleet,
    ):
        until(lambda: set(statuses(GOOD).values()) == {"PASS"} and not incidents(lasting=True), "all is well", 120)
        fleet.roll_out(BAD)
        fleet.drifted = FIRST
        until(lambda: incidents(lasting=True), "the first slices break")
        (first,) = incidents(lasting=True)
        fleet.drifted = DRIFTED
        until(lambda: len(incidents(lasting=True)[0]["slices"]) > 3 + 1, "it grows")
        evaluator.kill()
        evaluator = serve(*grouping, "--http-port", ports[0], "--api-port", ports[1], **endpoints)
        until(lambda: len(incidents(lasting=True)[0]["slices"]) == 46, "all that drifts is broken, and all traffic")
        measured = "this kernel was measured after a router applied it"
        until(lambda: measured in incidents(lasting=True)[0]["state_text"], "its shadow is no silence")
        (incident,) = incidents(lasting=True)
        assert (incident["id"], incident["since"]) == (first["id"], first["since"])
        until(lambda: told_of(pagerduty) >= {"all", *DRIFTED}, "the pager knows of every slice")

        watched = shown("status", "--url", evaluator.api).splitlines()
        assert watched[0].startswith("Broken; routing to the training kernel was ordered at ")
        head = "\n".join(watched[:9])
        assert re.search("fleet: token-tv (is|was) above its limit on team-", " ".join(head.split()))
        assert re.search(f"46 slices[^;]*; incident {incident['id']}", head)
        assert "  on vllm 0.32 fp8" in head
        assert any(re.match(r"and \d+ more: ", line) for line in watched)
        assert max(map(len, watched)) <= 80
        assert [(entry["on"], entry["state"]) for entry in incidents(lasting=True)] == [("fail", "broken")]
        look(browser, evaluator.api, incident["id"], pictures)
        failing = lambda: sum(status == "FAIL" for status in statuses(BAD).values())  # noqa: E731
        until(lambda: overview.tile("Broken") == failing(), "Grafana counts alike")
        assert overview.tile("Open incidents") == 1
        assert len(overview.rows("Verdicts over time")) == 46, "what was ever broken comes first"
        (mark,) = overview.rows("Incidents")
        assert (mark["metric"]["kc_incident"], mark["value"][1]) == (incident["id"], "2"), "broken, not contained"

        fleet.roll_out(GOOD)
        until(lambda: pagerduty.taken[-1]["event_action"] == "resolve", "the pager is told of the end", 240)
        over = ("No longer measured as broken", "Ended")  # its last recorder left it a long window ago
        until(lambda: slack.taken[-1]["text"].startswith(over), "and so is the channel", 120)
        (incident,) = incidents(lasting=True)
        assert incident["state_text"].startswith(over), "its requests are still routed away"
        shown("route", "resume", "fleet", "--why", "rolled back to 0.31", "--by", "ada", "--url", evaluator.api)
        until(lambda: not incidents(lasting=True), "it is over")
    events = [event["event_action"] for event in pagerduty.taken]
    assert events == ["trigger"] * (len(events) - 1) + ["resolve"]
    assert {event["dedup_key"] for event in pagerduty.taken} == {f"kc-otel/fleet/{incident['id']}"}
    assert len(events) <= 8, "an update at most every few seconds, not one for each slice"
    assert min(pagerduty.refused, slack.refused) >= 1, "both had to wait for their turn"
    assert all(incident["id"] in str(message) for message in slack.taken)

    told = evaluator.get("/api/v1/incidents/" + incident["id"])
    assert {cell["slice"] for cell in told["cells"]} >= set(DRIFTED)
    said = "\n".join(action["text"] for action in told["actions"])
    assert said.index("to the training kernel") < said.index("notified pager by webhook")
