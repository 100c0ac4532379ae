"""Serving processes, routers, recorders and webhook endpoints around one evaluator, in one process and by one clock.

What happens to them is planted, so it is known which kernel served, and how badly, whatever the evaluator says.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common._internal import _encode_instrumentation_scope
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.client import router as router_module
from kc_otel.client.poll import Poller
from kc_otel.client.router import Router
from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.escalate import GroupTiming
from kc_otel.record.export_loop import scope_of
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state
from tests.judge.conftest import NOW, ns
from tests.tools.api import api_of

STEP, WINDOW, LONG_WINDOW, HEARTBEAT, STALE_AFTER = 15.0, 60.0, 300.0, 30.0, 120.0
GOOD, BAD = 2.0**-10, 0.5
TASKS = ("code", "prose", "chat")
TRAIN, NEW_TRAIN = "a" * 12, "f" * 12
TEXT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: NAME, version: VERSION, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
SLICES
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: LIMIT}
WIDE
observability: {window: 1m, long_window: 5m, min_samples: 500, heartbeat: 30s}
escalation:
ESCALATION
"""
ESCALATION = {
    "policy": """\
  - {on: fail, clear_for: 40s, severity: critical, do: [{route: train-kernel}, {webhook: pager}, hold-promotion]}
  - {on: fail, for: 40s, repeat: 10m, do: [{webhook: chat}, halt]}
  - {on: no-data, for: 30s, do: [{webhook: chat}]}
  - {on: invalid-input, do: [{webhook: pager}]}
promotion: {windows: 1, steps: [10%, 50%], approve: [full], skip: [offline-ci]}
""",
    "loop": """\
  - {on: fail, severity: critical, do: [halt, quarantine-rollouts, {webhook: chat}]}
  - {on: no-data, do: [{webhook: chat}]}
""",
}
SLICES = "slices: {code: {where: {task: CODE}}, prose: {where: {task: prose}}}"


@dataclass(frozen=True)
class Terms:
    """A contract's text, in the parts that people edit."""

    version: int = 1
    limit: float = 0.02
    code: str = "code"
    wide: bool = False

    def contract(self, name: str) -> Contract:
        return _contract(name, self)


@cache
def _contract(name: str, terms: Terms) -> Contract:
    text = TEXT.replace("SLICES", SLICES if name == "policy" else "").replace("CODE", terms.code)
    wide = "  - {id: wide, metric: tv_token, unit: token, limit: 0.3}" if terms.wide and name == "policy" else ""
    parts = {"NAME": name, "VERSION": str(terms.version), "LIMIT": str(terms.limit), "WIDE": wide}
    for word, part in {**parts, "ESCALATION": ESCALATION[name]}.items():
        text = text.replace(word, part)
    return load_text(text, f"{name}.yaml")


@cache
def _slices(name: str, terms: Terms, task: str) -> tuple[str, ...]:
    return _contract(name, terms).slices_of({"task": task})


@dataclass
class Pod:
    """A process that serves a kernel version, with a recorder that applies the contract as it was at its start."""

    name: str
    contract: str
    terms: Terms
    version: str
    train: str
    cumulative: bool
    started: float
    began: float = 0.0
    """When it served first."""
    alive: bool = True
    heard: bool = True
    """Whether its exports get through."""
    broken: bool = False
    """Whether it drifts on all requests, whatever others of its version do."""
    invalid: bool = False
    """Whether what it hands to its recorder fails the input checks."""
    told_end: float | None = None
    """When it told the evaluator that it shuts down."""
    told: bool = False
    """Whether anything of it was ever taken."""
    pending: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    totals: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    failing: Counter[str] = field(default_factory=Counter)
    new_failing: Counter[str] = field(default_factory=Counter)
    last_report: float = 0.0
    seen: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By slice, (time, tokens, bad ones) of what the evaluator has taken."""
    lumps: list[float] = field(default_factory=list)
    """When the evaluator took at once what had come together over a longer time: it may belong to no window."""
    seen_invalid: dict[str, float] = field(default_factory=dict)

    def serve(self, task: str, tokens: int, now: float, drift: float) -> None:
        """Serve requests, of whose tokens a share drifts."""
        self.began = self.began or now - STEP
        for slice in _slices(self.contract, self.terms, task):
            if self.invalid:
                self.new_failing[slice] += 1
            else:
                bad = tokens if self.broken else round(tokens * drift)
                self.pending[slice][0] += tokens - bad
                self.pending[slice][1] += bad

    def export(self, now: float, *, ends: bool = False, host: str = "") -> ExportMetricsServiceRequest:
        """What it says now, by way of a Collector's host; the counts that it has not said yet are taken by `taken`."""
        message = ExportMetricsServiceRequest()
        of = message.resource_metrics.add()
        for key, value in {"service.instance.id": self.name, **({"host.name": host} if host else {})}.items():
            of.resource.attributes.add(key=key).value.string_value = value
        scope = of.scope_metrics.add()
        scope.scope.CopyFrom(_scope(self.contract, self.terms))
        pair = {"contract": self.contract, "kernel.train": self.train, "kernel.inference": self.version}
        data = scope.metrics.add(name="kc.drift.tv_token", unit="1").exponential_histogram
        data.aggregation_temporality = 2 if self.cumulative else 1
        start = self.began or now if self.cumulative else self.last_report or self.started
        for slice in {**self.totals, **self.pending}:
            counts = self.pending[slice]
            if self.cumulative:
                counts = [was + more for was, more in zip(self.totals[slice], counts, strict=True)]
            if any(counts):
                point = data.data_points.add(start_time_unix_nano=ns(start), time_unix_nano=ns(now), count=sum(counts))
                _named(point, **pair, slice=slice)
                point.sum = counts[0] * GOOD + counts[1] * BAD
                point.min, point.max = (GOOD if counts[0] else BAD), (BAD if counts[1] else GOOD)
                point.positive.offset = -11
                point.positive.bucket_counts.extend([counts[0], *[0] * 8, counts[1]])
        if self.failing or self.new_failing:
            bad = scope.metrics.add(name="kc.input.invalid", unit="1").sum
            bad.aggregation_temporality, bad.is_monotonic = 2, True
            prompts = scope.metrics.add(name="kc.sampling.rollouts", unit="1").exponential_histogram
            prompts.aggregation_temporality = 2
            for slice in {**self.failing, **self.new_failing}:
                many = self.failing[slice] + self.new_failing[slice]
                points = [prompts.data_points.add(count=many, sum=many, min=1.0, max=1.0)]
                points[0].positive.offset = -1
                points[0].positive.bucket_counts.append(many)
                if slice != "all" or self.cumulative:
                    points.append(bad.data_points.add(as_int=many))
                for point in points:
                    point.start_time_unix_nano, point.time_unix_nano = ns(self.started), ns(now)
                    _named(point, **pair, reason="nan_logprob", slice=slice)
        info = scope.metrics.add(name="kc.kernel.info", unit="1").gauge
        for role, version, engine, dtype in (
            ("train", self.train, "torch", "float32"),
            ("inference", self.version, "vllm", "bfloat16"),
        ):
            point = info.data_points.add(time_unix_nano=ns(now), as_int=int(not ends))
            fields = {"kernel.role": role, "kernel.version": version, "kernel.engine": engine, "kernel.dtype": dtype}
            _named(point, contract=self.contract, **fields)
        return message

    def taken(self, now: float, refused: Collection[str]) -> None:
        """The evaluator has taken what it exported, but of slices that the pod defines otherwise."""
        late, self.told, self.last_report = self.told and now > self.last_report + 2 * STEP, True, now
        self.lumps += [now] * (late or bool(refused))
        for slice, counts in self.pending.items():
            old = self.cumulative and not any(self.totals[slice]) and now > self.began + LONG_WINDOW - STEP
            self.lumps += [now] * old  # nobody knows how old the first counts of a slice are
            if any(counts) and slice not in refused and not (late or old):
                self.seen[slice].append((now, sum(counts), counts[1]))
            if any(counts):
                self.totals[slice] = [was + more for was, more in zip(self.totals[slice], counts, strict=True)]
        self.pending.clear()
        for slice, many in self.new_failing.items():
            self.failing[slice] += many
            self.seen_invalid[slice] = now
        self.new_failing.clear()


@cache
def _scope(name: str, terms: Terms) -> Any:
    return _encode_instrumentation_scope(scope_of(_contract(name, terms)))


def _named(point: Any, **attributes: str) -> None:
    for name, value in attributes.items():
        point.attributes.add(key=f"kc.{name}").value.string_value = value


class Line(Poller):
    """A router's line to the evaluator, on which it asks when it is told to."""

    def __init__(self, town: Town, *arguments: Any, **options: Any) -> None:
        super().__init__("http://evaluator", *arguments[1:], **options)
        self.town, self.up, self.asked = town, True, 0.0

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass

    def stop(self) -> None:
        if self.up and self.town.core is not None and self._table is not None:
            self._request("&closing=true")

    def ask(self) -> bool:
        """Ask once; return whether there was an answer."""
        if not self.up or self.town.core is None:
            return False
        try:
            self._ask()
        except ValueError:  # nothing has been evaluated for a while
            return False
        self.asked = self.town.now
        return True

    def _connect(self, _timeout: float) -> Any:
        return SimpleNamespace(request=self._get, getresponse=lambda: self.answer, sock=None, close=lambda: None)

    def _waits_in_vain(self, _: Any) -> bool:
        return False

    def _get(self, _method: str, path: str, headers: Mapping[str, str]) -> None:  # noqa: ARG002
        answer = self.town.ask("GET", path)
        self.answer: Any = SimpleNamespace(
            status=answer.status_code,
            headers=answer.headers,
            getheader=answer.headers.get,
            read=lambda _: answer.content,
        )


@dataclass
class Gateway:
    """A process that asks its router which kernel version serves a request."""

    name: str
    router: Router
    line: Line
    contract: Contract
    trusted: frozenset[str]
    idle: bool = False
    """Whether it gets no requests."""
    fresh_until: float = 0.0


class Town:
    """All of them; `step` lets some seconds pass."""

    def __init__(self, patch: pytest.MonkeyPatch, timing: GroupTiming) -> None:
        self.folder, self.now, self.timing = Path(tempfile.mkdtemp(prefix="kc-otel-")), NOW, timing
        patch.setattr(time, "time", lambda: self.now)
        patch.setattr(httpx, "request", lambda method, url, timeout=None, **more: self.ask(method, url, **more))  # noqa: ARG005
        patch.setattr(router_module, "Poller", lambda *arguments, **options: Line(self, *arguments, **options))
        self.terms = {"policy": Terms(), "loop": Terms()}
        self.loop = asyncio.new_event_loop()
        self.pods: list[Pod] = []
        self.gateways: list[Gateway] = []
        self.bad: dict[tuple[str, str], float] = {}
        """Share of the tokens that drift, by version and task."""
        self.stable, self.candidate, self.around = "b" * 12, "", False
        self.mirrored = self.collectors = False
        self.opened, self.left = -math.inf, self.now
        """Since when there has been no outage of the evaluator longer than a heartbeat, and when it was killed last."""
        self.down: set[str] = set()
        self.delivered: list[tuple[str, bytes]] = []
        self.names = 0
        self.core: Core | None = None

    # The evaluator

    def open(self) -> Core:
        self.opened = self.now if self.now - self.left > HEARTBEAT else self.opened
        self.connection = open_state(self.folder / "state.sqlite")
        self.connection.execute("PRAGMA synchronous=OFF")  # a killed process loses nothing by it, and it is quick
        contracts = [terms.contract(name) for name, terms in self.terms.items()]
        self.core = core = Core(
            contracts, self.connection, external_url="http://evaluator", now=self.now, timing=self.timing
        )
        self.app: Any = api_of(core)
        return core

    def kill(self) -> None:
        if self.core is not None:
            self.connection.close()
            self.core, self.left = None, self.now

    def ask(self, method: str, path: str, params: Any = None, **_: Any) -> httpx.Response:
        """What the evaluator's API answers."""
        path, _, query = path.removeprefix("http://127.0.0.1:4320").partition("?")
        query += httpx.QueryParams(params).__str__() if params else ""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(b"host", b"evaluator")],
            "server": ("evaluator", 80),
            "client": ("127.0.0.1", 1),
            "scheme": "http",
            "root_path": "",
            "asgi": {"version": "3.0"},
        }
        parts: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(part: dict[str, Any]) -> None:
            parts.append(part)

        self.loop.run_until_complete(self.app(scope, receive, send))
        body = b"".join(part.get("body", b"") for part in parts)
        return httpx.Response(parts[0]["status"], headers=parts[0]["headers"], content=body)

    def get(self, path: str) -> Any:
        answer = self.ask("GET", f"/api/v1/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.line.up = False
            gateway.router.close()
        self.kill()
        self.loop.close()
        shutil.rmtree(self.folder)

    # Processes

    def new_pod(self, version: str, contract: str = "policy", train: str = TRAIN) -> Pod:
        self.names += 1
        name, cumulative = f"{UUID(int=self.names)}", self.names % 2 == 1
        pod = Pod(name, contract, self.terms[contract], version, train, cumulative, self.now)
        self.pods.append(pod)
        return pod

    def alive(self, version: str = "", contract: str = "") -> list[Pod]:
        mine = [pod for pod in self.pods if pod.alive and contract in {"", pod.contract}]
        return [pod for pod in mine if version in {"", pod.version}]

    def shut_down(self, pod: Pod) -> None:
        """End it in order: its last export says so, if it gets through."""
        pod.alive = False
        if self.send(pod, ends=True):
            pod.told_end = self.now

    def send(self, pod: Pod, *, ends: bool = False) -> bool:
        if self.core is None or not pod.heard:
            if not pod.cumulative:
                pod.pending.clear()  # nobody repeats them for long
            return False
        host = f"host-{round(self.now - NOW) // round(STEP) % 2}" if self.collectors else ""
        request = pod.export(self.now, ends=ends, host=host)
        taken = self.core.evaluator.columns_of(request.SerializeToString(), 1000)
        result = self.core.metrics(request if taken is None else taken, self.now)
        redefined = {"code"} if pod.terms.code != self.terms[pod.contract].code else set[str]()
        assert redefined or not result.rejected, result.message
        pod.taken(self.now, redefined)
        return True

    def new_gateway(self, *trusted_versions: str) -> Gateway:
        self.names += 1
        contract, trusted = self.terms["policy"].contract("policy"), frozenset(trusted_versions)
        options = {"wait": 0.0, "stale_after": STALE_AFTER, "trusted": trusted, "keep": False}
        router = Router("http://evaluator", contracts=[contract], **options)
        router._clock = lambda: self.now
        router._instance = f"gateway-{self.names}"
        line = router._poller
        assert isinstance(line, Line)
        made = Gateway(router._instance, router, line, contract, trusted)
        self.gateways.append(made)
        self.poll(made)
        return made

    def poll(self, gateway: Gateway) -> None:
        if gateway.line.ask():
            gateway.fresh_until = self.now + STALE_AFTER

    @property
    def versions(self) -> list[str]:
        return [version for version in (self.candidate, self.stable) if version]

    # Time

    def traffic(self) -> Iterator[tuple[Gateway | None, str, str | None, int]]:
        """(gateway, task, version chosen, tokens)."""
        for gateway in self.gateways:
            for task in () if gateway.idle else TASKS:
                chosen = Counter(
                    gateway.router.choose_version("policy", {"task": task}, self.versions, key=f"user-{user}")
                    for user in range(20)
                )
                yield from ((gateway, task, version, 50 * many) for version, many in chosen.items())
        if self.around or not self.gateways:
            yield from ((None, task, self.stable, 600) for task in TASKS)

    def step(self) -> None:
        self.now += STEP
        for gateway in self.gateways:
            self.poll(gateway)
        self.requests()
        for pod in self.alive():
            self.send(pod)
        for gateway in self.gateways:
            if gateway.router._has_news():
                self.poll(gateway)
        self.judge()
        self.deliver()

    def requests(self) -> None:
        """Serve what the routers choose, and what else comes."""
        for gateway, task, version, tokens in self.traffic():
            self.chosen(gateway, version)
            if version is not None:
                self.serve(version, task, tokens)
        if self.mirrored and self.candidate:
            for task in TASKS:
                self.serve(self.candidate, task, 600)
        for pod in self.alive(contract="loop"):
            pod.serve("code", 1000, self.now, self.bad.get((pod.version, "code"), 0.0))

    def chosen(self, gateway: Gateway | None, version: str | None) -> None:
        """Look at what a router chose."""

    def serve(self, version: str, task: str, tokens: int) -> None:
        pods = self.alive(version, "policy")
        for pod in pods:
            pod.serve(task, tokens // len(pods), self.now, self.bad.get((version, task), 0.0))

    def judge(self) -> None:
        if self.core is not None:
            self.core.tick(self.now)

    def deliver(self) -> None:
        if self.core is None:
            return
        for _ in range(50):
            due = self.core.outbox.due(self.now)
            if not due:
                break
            for message in due:
                self.core.outbox.begin(message.id)
                if message.endpoint in self.down:
                    self.core.outbox.answered(message.id, self.now, 503, "unavailable")
                else:
                    self.core.outbox.answered(message.id, self.now, 204)
                    self.delivered.append((message.endpoint, message.body))
