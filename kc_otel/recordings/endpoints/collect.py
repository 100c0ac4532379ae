"""Completions of one endpoint, scored by another, as a recording.

A prompt that is not answered is no sample at random: it was the longest, or the one on which a kernel broke. So every
failure is kept beside the successes, and a judge has to look at both.

An early stop looks at completions in the order of the requests, never in that of the answers: short answers come first.
So that a slow answer does not make it ask for all the others meanwhile, it runs ahead of the first that is missing by
twice the number of requests at a time and no more. A failure ends the looking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.endpoints.answers import Sampled
from kc_otel.recordings.endpoints.endpoint_client import CompletionClient, RequestFailedError
from kc_otel.recordings.endpoints.prompts import Prompt
from kc_otel.recordings.recording import Recording, prompt_id
from kc_otel.recordings.request import NEUTRAL

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


class _EnoughError(Exception):
    """Signal that the completions so far decide, and that no more are requested."""


class _Prefix:
    """The completions that are there without a gap, looked at as they grow, and how many of them were enough.

    It looks where each prompt has all its samples: a prompt is one observation, which later samples would change.
    """

    def __init__(
        self, enough: Callable[[Recording], bool] | None, looks: Iterable[int], whole: int, samples: int, ahead: int
    ) -> None:
        self.decided: int | None = None
        self._samples = samples
        self._enough, self._due, self._whole = enough, iter(looks), whole
        self._there, self._next = 0, next(iter(self._due), whole)
        self._ahead = whole if enough is None else ahead
        self._grown = asyncio.Event()

    async def reach(self, place: int) -> None:
        """Wait until a completion is no more than `ahead` beyond the first that is missing."""
        while place >= self._there + self._ahead:
            await self._grown.wait()

    def end(self) -> None:
        """Look no more, and wait for nothing: there is a gap that stays."""
        self._ahead = self._whole
        self._grow()

    def _grow(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def look(self, done: Mapping[int, _Scored]) -> None:
        """Look once more if there are as many as that takes; raises _EnoughError if they are enough."""
        before = self._there
        while self.decided is None and self._enough is not None and self._there in done:
            self._there += 1
            if self._next <= self._there < self._whole and self._there % self._samples == 0:
                if self._enough(_recording([done[place] for place in range(self._there)])):
                    self.decided = self._there
                self._next = next(self._due, self._whole)
        if self._there > before:
            self._grow()
        if self.decided is not None:
            raise _EnoughError


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

    `inference` and `train` are endpoints with their models' names. `enough` says whether the first completions are
    enough, so that no more are asked for; it is asked at the ascending numbers of completions in `looks`, or with the
    next prompt that is whole. Prompts are then asked in an order that their file does not decide, each with all its
    samples. `progress` is called after each completion with those that are done, those that failed, and tokens.

    Raises:
        RefusedError: If an endpoint answers in a way that would be the same for every prompt.
    """
    whole = len(prompts) * samples
    work = enumerate(_order(prompts, samples, shuffled=enough is not None))  # shared by the workers
    done: dict[int, _Scored] = {}
    failures: list[Failure] = []
    prefix = _Prefix(enough, looks, whole, samples, 2 * concurrency)
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for place, prompt in work:
            if len(failures) >= _MAX_FAILURES:
                return
            await prefix.reach(place)
            try:
                done[place] = await _one(prompt, inference, train, max_tokens)
                tokens += len(done[place].train)
                prefix.look(done)
            except RequestFailedError as error:
                failures.append(Failure(prompt.line, str(error)))
                prefix.end()
            progress(len(done), len(failures), tokens)

    workers = [asyncio.create_task(worker()) for _ in range(min(concurrency, whole))]
    try:
        await asyncio.gather(*workers)
    except _EnoughError:
        pass
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if prefix.decided is not None:
        return Collected(_recording([done[at] for at in range(prefix.decided)]), (), prefix.decided)
    rows = [done[place] for place in sorted(done)]
    return Collected(_recording(rows) if rows else None, tuple(failures), whole)


def _order(prompts: Sequence[Prompt], samples: int, *, shuffled: bool) -> Iterator[Prompt]:
    """Order the prompts, each with all its samples: as in the file, or shuffled if a gate may stop early."""
    places = np.random.default_rng(0).permutation(len(prompts)) if shuffled else range(len(prompts))
    return (prompts[place] for place in places for _ in range(samples))


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
        "model": name,
        "prompt_id": prompt_id(np.array(found.prompt_ids, dtype=np.int64)),
    }
    if found.finish_reason:
        automatic["finish_reason"] = found.finish_reason
    # The request names each of these, so that no default of the server is in force.
    asked = {parameter: values[0] for parameter, values in NEUTRAL.items()}
    return _Scored(found, logprobs, automatic | dict(prompt.attributes) | asked)


def _recording(rows: Sequence[_Scored]) -> Recording:
    return Recording(
        train=np.array([value for row in rows for value in row.train], dtype=np.float64),
        inference=np.array([value for row in rows for value in row.sampled.logprobs], dtype=np.float64),
        lengths=np.array([len(row.train) for row in rows], dtype=np.int64),
        attributes=tuple(row.attributes for row in rows),
        token_ids=np.array([token for row in rows for token in row.sampled.token_ids], dtype=np.int64),
    )
