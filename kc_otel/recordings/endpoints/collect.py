"""Completions of one endpoint, scored by another, as a recording.

A prompt that is not answered is no sample at random: it was the longest, or the one on which a kernel broke. So every
failure is kept beside the successes, and a judge has to look at both.

An early stop looks at the first completions in the order of the requests, once all of them are there: in the order of
answers, short ones come first. A failure ends the looking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.endpoints.answers import Sampled
from kc_otel.recordings.endpoints.endpoint_client import CompletionClient, RequestFailedError
from kc_otel.recordings.endpoints.prompts import Prompt
from kc_otel.recordings.recording import Recording, prompt_id
from kc_otel.recordings.request import NEUTRAL

_CUT_OFF: Final = frozenset({"abort", "error"})
"""Finish reasons of a completion that the engine gave up."""
_MAX_FAILURES: Final = 20
"""After so many, nothing more is asked: they are no accident, and say all there is to know."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A completion that is missing: the line of its prompt, and the failure, with the endpoint."""

    line: int
    why: str


@dataclass(frozen=True, slots=True)
class _Scored:
    sampled: Sampled
    train: tuple[float, ...]
    attributes: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Collected:
    """Completions in the order of asking, None for none; `asked` is how many should be there: all, or enough."""

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
    enough: Callable[[Recording], bool] | None = None,
    looks: Iterable[int] = (),
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Collected:
    """Sample from one endpoint, and score the same tokens with the other; it ends early after 20 failures.

    Endpoints come with their models' names. `enough` is asked at the numbers of completions in `looks`; prompts are
    then in an order that their file does not decide. `progress` gets completions done, failed, and tokens. A
    RefusedError if an endpoint answers in a way that would be the same for every prompt.
    """
    whole = len(prompts) * samples
    work = enumerate(_order(prompts, samples, shuffled=enough is not None))
    done: dict[int, _Scored] = {}
    failures: list[Failure] = []
    tokens = asked = 0

    async def worker(part: Iterator[tuple[int, Prompt]]) -> None:
        nonlocal tokens
        for place, prompt in part:
            if len(failures) >= _MAX_FAILURES:
                return
            try:
                done[place] = await _one(prompt, inference, train, max_tokens)
                tokens += len(done[place].train)
            except RequestFailedError as error:
                failures.append(Failure(prompt.line, str(error)))
            progress(len(done), len(failures), tokens)

    for until in _looked_at(() if enough is None else looks, samples, whole):
        part = islice(work, until - asked)  # shared by the workers
        workers = [asyncio.create_task(worker(part)) for _ in range(min(concurrency, until - asked))]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        asked = until
        if enough is not None and asked < whole and not failures and enough(_recording(done)):
            break
    return Collected(_recording(done) if done else None, tuple(failures), whole if failures else asked)


def _looked_at(looks: Iterable[int], samples: int, whole: int) -> Iterator[int]:
    """Numbers of completions at which to look, all at last; a prompt with some of its samples would change later."""
    last = 0
    for look in looks:
        number = -(-look // samples) * samples
        if number >= whole:
            break
        if number > last:
            yield number
        last = number
    yield whole


def _order(prompts: Sequence[Prompt], samples: int, *, shuffled: bool) -> Iterator[Prompt]:
    """Order the prompts, each with all its samples: as in the file, or shuffled if a gate may stop early."""
    places = np.random.default_rng(0).permutation(len(prompts)) if shuffled else range(len(prompts))
    return (prompts[place] for place in places for _ in range(samples))


async def _one(
    prompt: Prompt, inference: tuple[CompletionClient, str], train: tuple[CompletionClient, str], max_tokens: int
) -> _Scored:
    sampler, name = inference
    found = await sampler.sample(name, prompt, max_tokens)
    if found.finish_reason in _CUT_OFF:
        raise RequestFailedError(f"{sampler.endpoint}: answers with finish_reason {found.finish_reason!r}")
    if not found.token_ids:
        raise RequestFailedError(f"{sampler.endpoint}: answers with a completion of no token")
    scorer, trained = train
    logprobs = await scorer.score(trained, found.prompt_ids, found.token_ids)
    automatic: dict[str, Scalar] = {
        "prompt_tokens": len(found.prompt_ids),
        "completion_tokens": len(found.token_ids),
        "model": name,
        "prompt_id": prompt_id(np.array(found.prompt_ids, dtype=np.int64)),
    }
    if found.finish_reason:
        automatic["finish_reason"] = found.finish_reason
    # The request names each of these, so that no default of the server is in force.
    asked = {parameter: values[0] for parameter, values in NEUTRAL.items()}
    return _Scored(found, logprobs, automatic | dict(prompt.attributes) | asked)


def _recording(done: Mapping[int, _Scored]) -> Recording:
    rows = [done[place] for place in sorted(done)]
    return Recording(
        train=np.array([value for row in rows for value in row.train], dtype=np.float64),
        inference=np.array([value for row in rows for value in row.sampled.logprobs], dtype=np.float64),
        lengths=np.array([len(row.train) for row in rows], dtype=np.int64),
        attributes=tuple(row.attributes for row in rows),
        token_ids=np.array([token for row in rows for token in row.sampled.token_ids], dtype=np.int64),
    )
