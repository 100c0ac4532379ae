"""Recorders of one kernel version that report to a core, an evaluation every ten seconds."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.load import load_text
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.serve.core import Core
from kc_otel.serve.people_orders import close
from kc_otel.serve.store.state_file import open_state
from tests.judge.conftest import NOW, Sender, info_request, merge
from tests.tools.api import route_kept

TEXT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02}
observability: {window: 1m, long_window: 5m, min_samples: 500, heartbeat: 30s}
escalation:
  - {on: fail, clear_for: 1s, severity: critical, DO}
"""
SLICED = TEXT.replace(
    "statistical:", "slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}\nstatistical:"
)
STEP = 10.0
Observed = float | dict[str, float | None] | None
"""About the size of what a recorder observes at each step, on all traffic or by slice; None for no observations."""


class Fleet:
    """Recorders of one kernel version, and a core that they report to, which evaluates so many seconds later."""

    judged_after = 0.0

    def __init__(self, path: Path, do: str = "do: [{webhook: pager}]", text: str = TEXT) -> None:
        self.path, self.now, self.contract = path, NOW, load_text(text.replace("DO", do), "policy.yaml")
        self.senders = {name: Sender(instance=name, start=NOW - 1.0) for name in ("broken", "healthy", "third")}
        self.begin()

    def begin(self) -> None:
        """Start the evaluator; nobody else may hold its state file."""
        self.connection = open_state(self.path)
        self.core = Core([self.contract], self.connection, external_url="", now=self.now)

    def close(self) -> None:
        self.connection.close()

    def restart(self) -> None:
        self.close()
        self.begin()

    def feed(self, seconds: float, requests: Callable[[], Iterable[ExportMetricsServiceRequest]]) -> None:
        """Take what is sent at each step, and judge it."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for request in requests():
                self.core.metrics(request, self.now)
            self.core.tick(self.now + self.judged_after)

    def report(
        self, sender: Sender, mean: float | None, age: float = 0.0, version: str = "b" * 12
    ) -> ExportMetricsServiceRequest:
        """An export of a recorder with observations of about this size, or none at all."""
        observed = sender.request(self.now - age, np.full(0 if mean is None else 2000, mean or 0.0))
        return merge(observed, info_request(self.now, 1, sender.instance, version))

    def run(self, seconds: float, **means: Observed) -> list[IncidentState]:
        """Recorders of these names report, and the others nothing; return the states of the incidents that last."""
        self.feed(seconds, lambda: [self.reported(name, observed) for name, observed in means.items()])
        return self.states()

    def breach(self, seconds: float = 30.0) -> list[IncidentState]:
        """Two recorders keep the limit for a minute, and then one of them breaks it."""
        self.run(60, broken=0.001, healthy=0.001)
        return self.run(seconds, broken=0.4, healthy=0.001)

    def reported(self, name: str, observed: Observed) -> ExportMetricsServiceRequest:
        by_slice = observed if isinstance(observed, dict) else {"all": observed}
        for slice in by_slice.keys() - {"all"}:
            self.senders.setdefault(f"{name}/{slice}", Sender(instance=name, slice=slice, start=NOW - 1.0))
        senders = {slice: self.senders[name if slice == "all" else f"{name}/{slice}"] for slice in by_slice}
        return merge(*(self.report(senders[slice], mean) for slice, mean in by_slice.items()))

    def states(self, *kinds: str) -> list[IncidentState]:
        return [incident.state for incident in self.core.incidents() if not kinds or incident.on in kinds]

    def told(self) -> list[dict[str, Any]]:
        """The bodies of all webhooks, oldest first, whether or not an endpoint that was told nothing gets them."""
        return [json.loads(message.body) for message in self.core.outbox.messages()][::-1]

    def reasons(self) -> list[str]:
        return [body["notification_reason"] for body in self.told()]

    def ends(self) -> list[str]:
        """First lines of the webhooks that told of an end, the newest first."""
        ended = [body for body in self.told() if body["status"] == "resolved"]
        return [body["alerts"][0]["annotations"]["summary"] for body in reversed(ended)]


MakeFleet = Callable[..., Fleet]


def shut_down(fleet: Fleet) -> None:
    fleet.core.metrics(info_request(fleet.now, 0, "broken"), fleet.now)


def closed_by_a_person(fleet: Fleet) -> None:
    close(fleet.core, "policy", None, None, "ada", "it was killed", fleet.now)


def rolled_back_by_a_person(fleet: Fleet) -> None:
    core, version = fleet.core, "b" * 12
    core.promotions.tell("policy", version, "rollback", "ada", "it is dead", fleet.now, start=True)
    core.tick(fleet.now)
    route_kept(core, fleet.now)
