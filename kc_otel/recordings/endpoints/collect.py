"""Completions of one endpoint, scored by another, as a recording.

A prompt that is not answered is no sample at random: it was the longest, or the one on which a kernel broke. So every
failure is kept beside what succeeded, and whoever judges has to look at both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.recordings import Recording
from kc_otel.recordings.endpoints.answers import Sampled
from kc_otel.recordings.endpoints.endpoint_client import CompletionClient, RequestFailedError
from kc_otel.recordings.endpoints.prompts import Prompt

__all__ = ["Collected", "Failure", "collect"]

_MOST_FAILURES: Final = 20
"""After so many, nothing more is asked: they are no accident, and say all there is to know."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A completion that is missing.

    Attributes:
        line: Line of its prompt.
        why: What went wrong, with the endpoint.
    """

    line: int
    why: str


@dataclass(frozen=True, slots=True)
class _Scored:
    sampled: Sampled
    train: tuple[float, ...]
    attributes: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of it.

    Attributes:
        recording: Completions that were sampled and scored, in the order of the prompts; None for none.
        failures: Completions that are missing, in the order in which they failed.
        asked: Completions that should be there.
    """

    recording: Recording | None
    failures: tuple[Failure, ...]
    asked: int

    @property
    def missing(self) -> int:
        """Completions that failed or were not asked for any more."""
        return self.asked - (0 if self.recording is None else int(self.recording.lengths.size))


async def collect(
    prompts: Sequence[Prompt],
    inference: tuple[CompletionClient, str],
    train: tuple[CompletionClient, str],
    *,
    samples: int = 1,
    max_tokens: int = 256,
    concurrency: int = 8,
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Collected:
    """Sample from one endpoint, and score the same tokens with the other.

    Args:
        prompts: What to sample from.
        inference: The endpoint that samples, and its model's name.
        train: The endpoint that scores, and its model's name.
        samples: Completions of each prompt.
        max_tokens: Most tokens of a completion.
        concurrency: Most requests at a time.
        progress: Called after each completion with those that are done, those that failed, and tokens.

    Returns:
        The recording and the failures. It ends early after 20 failures.

    Raises:
        RefusedError: If an endpoint answers in a way that would be the same for every prompt.
    """
    work = enumerate(prompt for prompt in prompts for _ in range(samples))  # shared by the workers
    done: dict[int, _Scored] = {}
    failures: list[Failure] = []
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for place, prompt in work:
            if len(failures) >= _MOST_FAILURES:
                return
            try:
                done[place] = await _one(prompt, inference, train, max_tokens)
                tokens += len(done[place].train)
            except RequestFailedError as error:
                failures.append(Failure(prompt.line, str(error)))
            progress(len(done), len(failures), tokens)

    workers = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(prompts) * samples))]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    rows = [done[place] for place in sorted(done)]
    return Collected(_recording(rows) if rows else None, tuple(failures), len(prompts) * samples)


async def _one(
    prompt: Prompt, inference: tuple[CompletionClient, str], train: tuple[CompletionClient, str], max_tokens: int
) -> _Scored:
    sampler, name = inference
    found = await sampler.sample(name, prompt, max_tokens)
    if not found.token_ids:
        raise RequestFailedError(f"{sampler.endpoint}: answers with a completion of no token")
    scorer, trained = train
    logprobs = await scorer.score(trained, found.prompt_ids, found.token_ids)
    automatic: dict[str, Scalar] = {
        "prompt_tokens": len(found.prompt_ids),
        "completion_tokens": len(found.token_ids),
        "response_tokens": len(found.token_ids),  # the same, as contracts about rollouts call it
        "temperature": 1.0,
        "model": name,
    }
    if found.finish_reason:
        automatic["finish_reason"] = found.finish_reason
    return _Scored(found, logprobs, automatic | dict(prompt.attributes))


def _recording(rows: Sequence[_Scored]) -> Recording:
    return Recording(
        train=np.array([value for row in rows for value in row.train], dtype=np.float64),
        inference=np.array([value for row in rows for value in row.sampled.logprobs], dtype=np.float64),
        lengths=np.array([len(row.train) for row in rows], dtype=np.int64),
        attributes=tuple(row.attributes for row in rows),
        token_ids=np.array([token for row in rows for token in row.sampled.token_ids], dtype=np.int64),
    )
