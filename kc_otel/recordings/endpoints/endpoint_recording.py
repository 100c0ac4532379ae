"""A recording of two live endpoints: one samples, the other scores the same tokens, and a file keeps both.

A prompt that is not answered is no sample at random: it was the longest, or the one on which a kernel broke. So every
failure is kept beside the successes, and a missing completion leaves no verdict.

An early stop looks at the first completions in the order of the requests, once all of them are there: in the order of
answers, short ones come first. A failure ends the looking.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.model import NUMBER_FORMATS, KernelSpec
from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import Kernel
from kc_otel.record.pairing import content_key
from kc_otel.recordings.endpoints.endpoint_client import (
    CompletionClient,
    CompletionEndpoint,
    CompletionEndpointError,
    RequestFailedError,
)
from kc_otel.recordings.endpoints.protocol import UNPROCESSED, Sampled
from kc_otel.recordings.read_table import ATTRIBUTES, Problems, records, scalars_of
from kc_otel.recordings.recording import ONE_MODEL, Recording, RecordingError, of_one_model
from kc_otel.recordings.recording_files import save_recording
from kc_otel.recordings.request import NEUTRAL, effective

with extra("cli", "a gate that asks endpoints"):
    import httpx

_CUT_OFF: Final = frozenset({"abort", "error"})
_MAX_FAILURES: Final = 20
"""After so many, nothing more is asked: they are no accident, and say all there is to know."""
_PROGRESS_SECONDS: Final = 5.0
_MAX_LISTED_REASONS: Final = 5

_Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line of the file, counted from 1: one of `text`, `token_ids` and `messages`; endpoints make tokens."""

    line: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """The prompts of a file, other values as attributes; a RecordingError has everything that is wrong."""
    problems = Problems(str(path))
    found = []
    for line, row in records(Path(path), problems=problems):
        try:
            found.append(_prompt(line, row))
        except ValueError as error:
            problems.add(f"line {line}: {error}")
    if not found and not problems.all():
        problems.add("has no prompt; write one JSON object per line, such as {'prompt': 'Hello'} in double quotes")
    if problems.all():
        raise RecordingError(*problems.all())
    return tuple(found)


def _prompt(line: int, row: Mapping[str, Any]) -> Prompt:
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if row.get(name)]
    if len(given) != 1:
        said = " and ".join(given) if given else "none"
        raise ValueError(f"needs exactly one of prompt, prompt_token_ids and messages, not empty; it has {said}")
    text, token_ids, messages = row.get("prompt") or "", row.get("prompt_token_ids") or [], row.get("messages") or []
    if not isinstance(text, str):
        raise ValueError("prompt: is not text; tokens are called prompt_token_ids")  # noqa: TRY004
    if not (isinstance(token_ids, list) and all(type(token) is int and token >= 0 for token in token_ids)):
        raise ValueError("prompt_token_ids: is not a list of whole numbers from 0 on")
    if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise ValueError("messages: is not a list of objects such as {'role': 'user', 'content': '...'}")
    asked = effective({name: row[name] for name in NEUTRAL if row.get(name) is not None})
    if asked:
        said = ", ".join(f"{name}: {value}" for name, value in asked.items())
        raise ValueError(
            f"{said}: both endpoints are compared at temperature 1 without truncation or penalties; leave it out"
        )
    more = row.get(ATTRIBUTES)
    own = {name: value for name, value in row.items() if name != "prompt"}
    attributes = scalars_of(own) | (scalars_of(more) if isinstance(more, dict) else {})
    return Prompt(line, text, tuple(token_ids), tuple(messages), attributes)


_Scored = tuple[Sampled, tuple[float, ...], Mapping[str, Scalar]]
"""A completion, the other kernel's log-probabilities of its tokens, and attributes."""
_Asked = tuple[CompletionClient, str]


@dataclass(frozen=True, slots=True)
class Collected:
    """Completions in the order of asking; lines and reasons of failures; how many should be there: all, or enough."""

    recording: Recording | None
    failures: tuple[tuple[int, str], ...]
    asked: int

    @property
    def missing(self) -> int:
        """Completions that failed or were not asked for any more."""
        return self.asked - (0 if self.recording is None else int(self.recording.lengths.size))


async def collect(
    prompts: Sequence[Prompt],
    inference: _Asked,
    train: _Asked,
    *,
    samples: int = 1,
    max_tokens: int = 256,
    concurrency: int = 8,
    enough: Callable[[Recording], bool] | None = None,
    looks: Iterable[int] = (),
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Collected:
    """Sample from one endpoint, and score the same tokens with the other; it ends early after 20 failures.

    `enough` is asked at the numbers of completions in `looks`; prompts are then in an order that their file does not
    decide. `progress` gets completions done, failed, and tokens. A RefusedError if every answer would be alike.
    """
    whole = len(prompts) * samples
    work = enumerate(_order(prompts, samples, shuffled=enough is not None))
    done: dict[int, _Scored] = {}
    failures: list[tuple[int, str]] = []
    tokens = asked = 0

    async def worker(part: Iterator[tuple[int, Prompt]]) -> None:
        nonlocal tokens
        for place, prompt in part:
            if len(failures) >= _MAX_FAILURES:
                return
            try:
                done[place] = await _one(prompt, inference, train, max_tokens)
                tokens += len(done[place][1])
            except RequestFailedError as error:
                failures.append((prompt.line, str(error)))
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
    for look in takewhile(lambda number: number < whole, (-(-look // samples) * samples for look in looks)):
        if look > last:
            yield (last := look)
    yield whole


def _order(prompts: Sequence[Prompt], samples: int, *, shuffled: bool) -> Iterator[Prompt]:
    """Order the prompts, each with all its samples: as in the file, or shuffled if a gate may stop early."""
    places = np.random.default_rng(0).permutation(len(prompts)) if shuffled else range(len(prompts))
    return (prompts[place] for place in places for _ in range(samples))


async def _one(prompt: Prompt, inference: _Asked, train: _Asked, max_tokens: int) -> _Scored:
    (sampler, name), (scorer, trained) = inference, train
    sent: str | Sequence[int] = prompt.text or prompt.token_ids
    if prompt.messages:
        sent = await sampler.tokenized(name, prompt.messages)
    found = await sampler.sample(name, sent, max_tokens)
    if found.finish_reason in _CUT_OFF:
        raise RequestFailedError(f"{sampler.endpoint}: answers with finish_reason {found.finish_reason!r}")
    if not found.token_ids:
        raise RequestFailedError(f"{sampler.endpoint}: answers with a completion of no token")
    logprobs = await scorer.score(trained, found.prompt_ids, found.token_ids)
    automatic: dict[str, Scalar] = {
        "prompt_tokens": len(found.prompt_ids),
        "completion_tokens": len(found.token_ids),
        "model": name,
        "prompt_id": content_key((), found.prompt_ids),
        **({"finish_reason": found.finish_reason} if found.finish_reason else {}),
    }
    return found, logprobs, {**automatic, **prompt.attributes, **UNPROCESSED}


def _recording(done: Mapping[int, _Scored]) -> Recording:
    sampled, train, attributes = zip(*(done[place] for place in sorted(done)), strict=True)
    return Recording(
        train=np.concatenate(train),
        inference=np.concatenate([completion.logprobs for completion in sampled]),
        lengths=np.array([len(logprobs) for logprobs in train], dtype=np.int64),
        attributes=attributes,
        token_ids=np.concatenate([completion.token_ids for completion in sampled]).astype(np.int64),
    )


class IncompleteError(ValueError):
    """Completions are missing; the message says which and why, `recording` is the file of what was answered, if any."""

    def __init__(self, message: str, recording: Path | None) -> None:
        super().__init__(message)
        self.recording = recording


@dataclass(frozen=True, slots=True)
class EndpointPair:
    """Two endpoints: one samples, the other scores the same tokens. `kernels` are what has to answer, train first."""

    inference: CompletionEndpoint
    train: CompletionEndpoint
    kernels: tuple[Kernel, Kernel]
    inference_model: str | None = None
    train_model: str | None = None
    samples: int = 1
    max_tokens: int = 256


def record_endpoints(
    pair: EndpointPair,
    prompts: Path,
    where: Path | None,
    say: _Say,
    enough: Callable[[Recording], bool] | None = None,
    looks: Iterable[int] = (),
) -> Path:
    """Sample, score, and keep the recording; returns its file, in a temporary folder without `where`.

    `say` takes a line every few seconds, `enough` is asked of completions so far. An IncompleteError if completions are
    missing, a ValueError if an endpoint fails or one model both samples and scores, after its recording is kept.
    """
    asked = read_prompts(prompts)
    if where is not None:
        _check_writable(where)
    whole, lone = len(asked) * pair.samples, ""

    async def collected() -> Collected:
        nonlocal lone
        async with httpx.AsyncClient() as http:
            sampler, scorer = CompletionClient(pair.inference, http), CompletionClient(pair.train, http)
            sampled, trained = await sampler.model(pair.inference_model), await scorer.model(pair.train_model)
            unsaid = [await _same_kernel(*each, say) for each in zip((scorer, sampler), pair.kernels, strict=True)]
            if any(unsaid):
                say(f"not checked, because the endpoints do not say it: {', '.join(filter(None, unsaid))}")
            say(f"sampling from {sampled} at the {pair.inference}, scoring with {trained} at the {pair.train}")
            lone = sampled if sampled == trained and pair.inference.place == pair.train.place else ""
            terms: dict[str, Any] = {"samples": pair.samples, "max_tokens": pair.max_tokens, "enough": enough}
            shown = _progress(whole, say)
            return await collect(asked, (sampler, sampled), (scorer, trained), looks=looks, progress=shown, **terms)

    try:
        found = asyncio.run(collected())
    except CompletionEndpointError as error:
        raise ValueError(str(error)) from None
    if found.recording is None:
        raise IncompleteError("\n".join(_missing(found, prompts)), None)
    if where is None:
        where = Path(tempfile.mkdtemp(prefix="kc-otel-gate-")) / "recording.npz"
        say("the recording is kept in a temporary folder; pass --record FILE or --evidence to keep it elsewhere")
    save_recording(found.recording.with_attributes({ONE_MODEL: lone} if lone else {}), where)
    sequences = found.recording.lengths.size
    say(f"recording: {where} ({sequences:,} completions, {found.recording.train.size:,} tokens)")
    if found.missing:
        raise IncompleteError("\n".join(_missing(found, prompts)), where)
    if whole > sequences:
        say(f"decided after {sequences:,} of {whole:,} completions; the others were not requested")
    if lone:
        raise ValueError(of_one_model(lone, where))
    return where


async def _same_kernel(client: CompletionClient, kernel: Kernel, say: _Say) -> str:
    """Hold the engine that answers against the kernel that is judged; return number formats that it does not say."""
    side, wanted = client.endpoint.side, kernel.version
    served, field = await client.version(), f"--kernel {side}.version"
    if served and wanted and served != wanted:
        raise ValueError(f"{client.endpoint}: version {served} answers, and {field} says {wanted}")
    if served and not wanted:
        say(f"{client.endpoint}: version {served}; {field}={served} makes it part of the fingerprint")
    declared = {name: text for name, text in kernel.fields().items() if name in NUMBER_FORMATS}
    unsaid = await client.unsaid(KernelSpec(engine=kernel.engine, **declared))
    return " and ".join(f"{side} {name}" for name in unsaid)


def _check_writable(where: Path) -> None:
    """Check that the files can be written, before sampling costs time on two accelerators."""
    if where.suffix.lower() != ".npz":
        raise ValueError(f"{where}: recordings are written as .npz; end the name in that")
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        new = not where.exists()
        with where.open("ab"):
            pass
        if new:
            where.unlink()
    except OSError as error:
        raise ValueError(f"{where}: cannot be written ({error.strerror})") from None


def _progress(asked: int, say: _Say) -> Callable[[int, int, int], None]:
    started = last = time.monotonic()

    def report(done: int, failed: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            last = now
            missing = f", {failed:,} failed" if failed else ""
            say(f"  {done:,} of {asked:,} completions{missing}, {tokens / (now - started):,.0f} tokens/s")

    return report


def _missing(collected: Collected, prompts: Path) -> Iterator[str]:
    failures = collected.failures
    yield f"{collected.missing:,} of {collected.asked:,} completions are missing, {len(failures):,} of them failed:"
    reasons = Counter(why for _, why in failures)
    for why, times in reasons.most_common(_MAX_LISTED_REASONS):
        lines = sorted({line for line, reason in failures if reason == why})
        more = f" and {len(lines) - 3:,} more" if len(lines) > 3 else ""
        count = f" ({times:,} times)" if times > 1 else ""
        yield f"  {prompts}: line {', '.join(map(str, lines[:3]))}{more}: {why}{count}"
    if len(reasons) > _MAX_LISTED_REASONS:
        yield f"  and {len(reasons) - _MAX_LISTED_REASONS:,} other reasons"
    yield "no verdict: prompts that fail are not a random sample, so the others could PASS because of their absence"
