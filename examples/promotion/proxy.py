"""What stands before the kernels: it asks the router for every request, mirrors some, and has all of them compared."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import torch

from examples.demo.corpus import Text
from examples.demo.model import Model
from examples.demo.serving import COMPLETION, PROMPT, score
from examples.demo.train import windows
from kc_otel import Contract, Kernel, Recorder
from kc_otel.client.router import Router

BATCH = 32
"""Requests of each kind at a time."""
MIRRORED = 0.5
"""Share of the requests that a version in shadow gets a copy of."""


@dataclass(frozen=True)
class Deployed:
    """A version of the inference kernel that runs somewhere."""

    kernel: Kernel
    url: str


class Proxy:
    """Serves requests with the version that the decision table allows.

    Args:
        contract: What is promised.
        model: The training kernel; it scores what was sampled, off the requests' path in a real service.
        train: Its version.
        router: Asked for every request.
        stable: The version that serves where no other may.
    """

    def __init__(self, contract: Contract, model: Model, train: Kernel, router: Router, stable: Deployed) -> None:
        self.served: Counter[tuple[str, str]] = Counter()
        """Requests by (version, task), since somebody cleared it."""
        self.mirrored = 0
        self._contract, self._model, self._train, self._router = contract, model, train, router
        self._stable, self._candidate = stable, None
        self._client = httpx.Client(timeout=60.0, trust_env=False)
        self._recorders: dict[str, Recorder] = {}

    def deploy(self, candidate: Deployed | None) -> None:
        """Have another version run beside the stable one; whether it gets a request is the router's to say."""
        self._candidate = candidate

    def serve(self, corpus: Mapping[str, Text]) -> None:
        """A batch of requests, answered by one version each, with prompts that the model was not trained on."""
        tasks = [task for task in corpus for _ in range(BATCH)]
        prompts = windows([corpus[task].held_out for task in tasks], PROMPT)
        chosen = [self._choose(task) for task in tasks]
        for deployed in dict.fromkeys(chosen):
            rows = [row for row, version in enumerate(chosen) if version is deployed]
            self._ask(deployed, prompts[rows], [tasks[row] for row in rows])
            self.served.update((deployed.kernel.fingerprint, tasks[row]) for row in rows)
        if self._candidate is not None and self._candidate not in chosen:
            # Shadow: the client has its answer already, and nobody reads this one.
            rows = [row for row in range(len(tasks)) if torch.rand(()) < MIRRORED]
            self._ask(self._candidate, prompts[rows], [tasks[row] for row in rows])
            self.mirrored += len(rows)

    def _choose(self, task: str) -> Deployed:
        if self._candidate is None:
            return self._stable
        versions = (self._candidate.kernel.fingerprint, self._stable.kernel.fingerprint)
        # A service has the id of a user or conversation here; these requests have nothing in common.
        version = self._router.choose_version(self._contract.name, {"task": task}, versions, key=uuid.uuid4().hex)
        return self._candidate if version == versions[0] else self._stable

    def _ask(self, deployed: Deployed, prompts: torch.Tensor, tasks: list[str]) -> None:
        asked = {"prompts": prompts.tolist(), "length": COMPLETION}
        answer = self._client.post(f"{deployed.url}/generate", json=asked).raise_for_status().json()
        ids, logprobs = torch.tensor(answer["ids"]), torch.tensor(answer["logprobs"])
        scored = score(self._model, prompts, ids)
        attributes = [{"task": task} for task in tasks]
        self._recorder(deployed.kernel).compare(scored, logprobs, token_ids=ids, attributes=attributes)

    def _recorder(self, kernel: Kernel) -> Recorder:
        if kernel.fingerprint not in self._recorders:
            self._recorders[kernel.fingerprint] = Recorder(
                self._contract, train=self._train, inference=kernel, export_interval=1.0
            )
        return self._recorders[kernel.fingerprint]

    def close(self) -> None:
        """Export what is left."""
        for recorder in self._recorders.values():
            recorder.shutdown(timeout=3.0)
        self._client.close()
