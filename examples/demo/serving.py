"""The serving side: traffic in slices, a router that picks the kernel, and a recorder that compares the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from examples.demo.corpus import Text
from examples.demo.model import Model
from examples.demo.train import windows
from kc_otel import Contract, Kernel, Recorder
from kc_otel.client.router import Router

BATCH = {"code": 32, "prose": 27, "tables": 5}
"""Requests of each kind in a batch; tables are 8% of the traffic."""
PROMPT, COMPLETION = 32, 48

Sampled = tuple[torch.Tensor, torch.Tensor]


class InferenceKernel(Protocol):
    """What serves requests: `Sampler`, in one of its versions."""

    def generate(self, prompts: torch.Tensor, length: int) -> Sampled:
        """Ids [B, length] and their log-probs [B, length] from prompts [B, T]."""


@torch.no_grad()
def score(model: Model, prompts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log P [B, n] of sampled ids [B, n] after prompts [B, T], under the training kernel, in one forward pass."""
    logits = model(torch.cat((prompts, ids), 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)


@torch.no_grad()
def sample(model: Model, prompts: torch.Tensor, length: int) -> Sampled:
    """Ids and log-probs [B, length] from the training kernel itself: right, and slow, for it keeps no cache."""
    text, logprobs = prompts, []
    for _ in range(length):
        distribution = model(text)[:, -1].log_softmax(-1)
        tokens = torch.multinomial(distribution.exp(), 1)
        text = torch.cat((text, tokens), 1)
        logprobs.append(distribution.gather(1, tokens))
    return text[:, prompts.shape[1] :], torch.cat(logprobs, 1)


class Server:
    """Serves batches with the kernel that the decision table allows, and has them compared.

    Args:
        contract: What the recorders record for.
        model: The training kernel.
        train: Its version.
        router: Asked for every request.
    """

    def __init__(self, contract: Contract, model: Model, train: Kernel, router: Router) -> None:
        self.train = train
        self._name, self._model, self._router = contract.name, model, router

        def sampling() -> float:
            return router.sampling(contract.name, contract.observability.sampling)

        self._kernel = train
        self._sampler: InferenceKernel | None = None
        self._recorder = Recorder(contract, train=train, sampling=sampling, export_interval=1.0)
        # What the training kernel samples itself is a pair of its own: the same kernel on both sides.
        self._itself = Recorder(contract, train=train, inference=train, sampling=sampling, export_interval=1.0)

    def roll_out(self, kernel: Kernel, sampler: InferenceKernel) -> None:
        """Serve with another version of the inference kernel from now on."""
        self._kernel, self._sampler = kernel, sampler
        self._recorder.rollout(inference=kernel)

    def serve(self, corpus: Mapping[str, Text]) -> tuple[int, int]:
        """One batch of requests, with prompts from text that the model was not trained on.

        Returns:
            Tokens that the inference kernel generated, and tokens that the training kernel did.
        """
        assert self._sampler is not None, "roll out a kernel before serving"
        tasks = [task for task, count in BATCH.items() for _ in range(count)]
        prompts = windows([corpus[task].held_out for task in tasks], PROMPT)
        routed = {
            task: self._router.choose(self._name, {"task": task}, self._kernel.fingerprint) == "train-kernel"
            for task in BATCH
        }
        by_train = torch.tensor([routed[task] for task in tasks])
        rows = {kernel: [task for task in tasks if routed[task] is kernel] for kernel in (False, True)}
        if rows[False]:
            self._compare(self._recorder, prompts[~by_train], rows[False], self._sampler.generate)
        if rows[True]:
            self._compare(self._itself, prompts[by_train], rows[True], partial(sample, self._model))
        return COMPLETION * len(rows[False]), COMPLETION * len(rows[True])

    def _compare(
        self, recorder: Recorder, prompts: torch.Tensor, tasks: list[str], generate: Callable[..., Sampled]
    ) -> None:
        ids, logprobs = generate(prompts, COMPLETION)
        scored = score(self._model, prompts, ids)
        attributes = [{"task": task} for task in tasks]
        recorder.compare(scored, logprobs, token_ids=ids, prompt_ids=prompts, attributes=attributes)

    def close(self) -> None:
        """Export what is left."""
        for recorder in (self._recorder, self._itself):
            recorder.shutdown(timeout=3.0)
