"""The acts of the demo. Traffic flows; whatever is said about it comes from the evaluator's API and its webhooks.

No act knows what the evaluator will find. Each has a condition that the evaluator must report and a time limit, and an
act whose condition does not come ends the demo with an error.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from examples.demo.corpus import Text
from examples.demo.evaluator import Evaluator
from examples.demo.serving import InferenceKernel, Server
from examples.demo.terminal import Terminal, number
from kc_otel import Kernel
from kc_otel.client.router import Router

Verdict = dict[str, Any]

_LOOK = 1.0
_REPORT = 5.0


class StoryError(Exception):
    """Something that should have happened did not, or the other way round."""


class Story:
    """Serves traffic and tells what the evaluator makes of it.

    Args:
        terminal: Where it is told.
        corpus: Where prompts come from.
        server: Serves them.
        evaluator: Its API is asked once a second.
        router: Its table says where slices are served.
        webhooks: Verified bodies, as they arrive.
    """

    def __init__(
        self,
        terminal: Terminal,
        corpus: Mapping[str, Text],
        server: Server,
        evaluator: Evaluator,
        router: Router,
        webhooks: queue.Queue[dict[str, Any]],
    ) -> None:
        self.terminal, self.evaluator = terminal, evaluator
        self.verdicts: list[Verdict] = []
        self.firing: set[tuple[str, str]] = set()
        """(clause, slice) of critical alerts that the receiver was told of and not yet told the end of."""
        self.alerts = 0
        self.failed: list[tuple[str, str]] = []
        """(clause, slice) that failed, in the order in which they did."""
        self.names: dict[str, str] = {}
        self._corpus, self._server, self._router, self._webhooks = corpus, server, router, webhooks
        self._routed: frozenset[str] = frozenset()
        self._current = ""

    def roll_out(self, name: str, kernel: Kernel, sampler: InferenceKernel) -> None:
        """Serve with another kernel version from now on."""
        self.names[kernel.fingerprint] = name
        self._current = kernel.fingerprint
        self._server.roll_out(kernel, sampler)
        self.terminal.moment(f"rolled out: {name} (kernel version {kernel.fingerprint})", "bold cyan")

    def serve(self, until: Callable[[], bool], limit: float, otherwise: str) -> None:
        """Traffic until a condition holds, which is looked at after the evaluator was.

        Raises:
            StoryError: With `otherwise`, if it does not hold within `limit` seconds.
        """
        began = looked = reported = time.monotonic()
        tokens: Counter[str] = Counter()
        while True:
            by_inference, by_train = self._server.serve(self._corpus)
            tokens.update(inference=by_inference, train=by_train)
            now = time.monotonic()
            if now - looked >= _LOOK:
                looked = now
                self._look()
                if until():
                    return
            if now - reported >= _REPORT:
                self._report(tokens, now - reported)
                reported = now
                tokens.clear()
            if now - began > limit:
                raise StoryError(f"{otherwise} (waited {limit:.0f} s)")

    def all_pass(self) -> bool:
        """Whether the evaluator says PASS of every cell."""
        return bool(self.verdicts) and all(v["status"] == "PASS" for v in self.verdicts)

    def show(self) -> None:
        """The verdicts on what serves now; the version before stays in the window for a while."""
        replaced = set(self.names) - {self._current, self._server.train.fingerprint}
        self.terminal.verdicts([v for v in self.verdicts if v["kernel_inference"] not in replaced], self.names)

    def overall(self, clause: str) -> str:
        """What the evaluator says of a clause on all traffic together that the inference kernel serves."""
        cells = (v for v in self.verdicts if (v["clause"], v["slice"]) == (clause, "all"))
        return next(v["status"] for v in cells if v["kernel_inference"] == self._current)

    def recovered(self) -> bool:
        """Whether every alert is resolved, nothing fails, and what had failed passes."""
        if self.firing or any(v["status"] == "FAIL" for v in self.verdicts):
            return False
        return all(v["status"] == "PASS" for v in self.verdicts if (v["clause"], v["slice"]) in self.failed)

    def route_reason(self, slice: str) -> str | None:
        """Why the decision table keeps a slice away from the inference kernel; None where it does not."""
        return next((route.reason for route in self._router.table.routes if route.slice == slice), None)

    def _look(self) -> None:
        self.verdicts = self.evaluator.verdicts()
        for event in self.evaluator.events():
            self._tell(event)
        while not self._webhooks.empty():
            self._take(self._webhooks.get())
        routed = frozenset(route.slice for route in self._router.table.routes)
        for slice in sorted(routed - self._routed):
            self.terminal.moment(f"route: {slice} are to be served by the training kernel", "bold cyan")
            self.terminal.detail(f"because {self.route_reason(slice)}")
        self._routed = routed

    def _tell(self, event: dict[str, Any]) -> None:
        data = event["data"]
        if event["kind"] == "verdict" and data["status"] == "FAIL":
            self.failed.append((data["clause"], data["slice"]))
            name = self.names.get(data["kernel_inference"], "?")
            self.terminal.moment(f"verdict: {data['clause']} on {data['slice']} ({name}) is FAIL", "bold red")
            self.terminal.detail(data["message"].split(": ")[-1])
        elif event["kind"] == "firing":
            self.alerts += 1
            self.terminal.say(f"alert fires: {data['severity']}, {data['clause']} on {data['slice']}", "yellow")
        elif event["kind"] == "resolved":
            self.terminal.say(f"alert resolves: {data['severity']}, {data['clause']} on {data['slice']}", "yellow")

    def _take(self, body: dict[str, Any]) -> None:
        cells = [(alert["labels"]["clause"], alert["labels"]["slice"]) for alert in body["alerts"]]
        for cell, alert in zip(cells, body["alerts"], strict=True):
            (self.firing.add if alert["status"] == "firing" else self.firing.discard)(cell)
        said = ", ".join(f"{clause} on {slice}" for clause, slice in cells)
        self.terminal.moment(f"webhook, signature verified: {body['status']}: {said}", "bold magenta")
        for alert in body["alerts"]:
            if alert["status"] == "firing":
                self.terminal.detail(alert["annotations"]["description"])

    def _report(self, tokens: Counter[str], seconds: float) -> None:
        status = Counter(v["status"] for v in self.verdicts)
        drift: dict[str, list[str]] = {}
        for v in self.verdicts:
            if v["clause"] == "token-tv" and v["samples"]:
                measured = drift.setdefault(self.names.get(v["kernel_inference"], "?"), [])
                measured.append(f"{v['slice']} {number(v['estimate'])}")
        self.terminal.say(
            f"{sum(tokens.values()) / seconds:,.0f} tokens/s; "
            f"{', '.join(f'{count} {name}' for name, count in sorted(status.items()))}; token-tv "
            + " | ".join(f"{name}: {', '.join(measured)}" for name, measured in drift.items())
        )
