"""A recording of two live endpoints for the gate: one samples, the other scores the same tokens, and a file keeps both.

A missing completion leaves no verdict: failures are not random, and the answered prompts may be the easier ones.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kc_otel._extras import extra
from kc_otel.offline.gate.recorded_gate import looks
from kc_otel.recordings.endpoints.collect import Collected, collect
from kc_otel.recordings.endpoints.endpoint_client import CompletionClient, CompletionEndpoint, CompletionEndpointError
from kc_otel.recordings.endpoints.prompts import Prompt, read_prompts
from kc_otel.recordings.read_table import arrow
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import format_of, save_recording

with extra("cli", "a gate that asks endpoints"):
    import httpx

_PROGRESS_SECONDS: Final = 5.0
_MAX_LISTED_REASONS: Final = 5
"""Different reasons for missing completions that are listed."""

_Say = Callable[[str], None]


class IncompleteError(ValueError):
    """Completions are missing; the message says which and why, `recording` is the file of what was answered, if any."""

    def __init__(self, message: str, recording: Path | None) -> None:
        super().__init__(message)
        self.recording = recording


@dataclass(frozen=True, slots=True)
class EndpointPair:
    """Two endpoints: one samples, the other scores the same tokens. `versions` are of the engines, train first."""

    inference: CompletionEndpoint
    train: CompletionEndpoint
    inference_model: str | None = None
    train_model: str | None = None
    samples: int = 1
    max_tokens: int = 256
    versions: tuple[str | None, str | None] = (None, None)


def record_endpoints(
    pair: EndpointPair, prompts: Path, where: Path | None, say: _Say, enough: Callable[[Recording], bool] | None = None
) -> Path:
    """Sample, score, and keep the recording; returns its file. `say` takes a line on what happens, every few seconds.

    Without `where` it is in a temporary folder that is kept. `enough` is asked of completions so far; None for all.

    Raises:
        IncompleteError: If completions are missing.
        ValueError: If an endpoint fails, or one model both samples and scores, after its recording is kept.
    """
    asked = read_prompts(prompts)
    if where is not None:
        _check_writable(where)
    try:
        collected, lone = asyncio.run(_collected(pair, asked, say, enough))
    except CompletionEndpointError as error:
        raise ValueError(str(error)) from None
    if collected.recording is not None:
        if where is None:
            where = Path(tempfile.mkdtemp(prefix="kc-otel-gate-")) / "recording.npz"
            say("the recording is kept in a temporary folder; pass --record FILE or --evidence to keep it elsewhere")
        save_recording(collected.recording, where)
        tokens, sequences = collected.recording.train.size, collected.recording.lengths.size
        say(f"recording: {where} ({sequences:,} completions, {tokens:,} tokens)")
        if not collected.missing:
            if (whole := len(asked) * pair.samples) > sequences:
                say(f"decided after {sequences:,} of {whole:,} completions; the others were not requested")
            if lone:
                raise ValueError(
                    f"no decision: {lone} both sampled and scored, so that this compares its decoding with "
                    f"its prefill, the floor of such comparisons, and not two kernels; kc-otel compare {where} shows it"
                )
            return where
    kept = None if collected.recording is None else where
    raise IncompleteError("\n".join(_missing(collected, prompts)), kept)


async def _collected(
    pair: EndpointPair, prompts: tuple[Prompt, ...], say: _Say, enough: Callable[[Recording], bool] | None
) -> tuple[Collected, str]:
    """Completions, and the name of the model that both samples and scores; empty where two do."""
    async with httpx.AsyncClient() as http:
        sampler, scorer = CompletionClient(pair.inference, http), CompletionClient(pair.train, http)
        sampled, trained = await sampler.model(pair.inference_model), await scorer.model(pair.train_model)
        for client, wanted in ((scorer, pair.versions[0]), (sampler, pair.versions[1])):
            await _same_version(client, wanted, say)
        say(f"sampling from {sampled} at the {pair.inference}, scoring with {trained} at the {pair.train}")
        lone = sampled if sampled == trained and pair.inference.root == pair.train.root else ""
        found = await collect(
            prompts,
            (sampler, sampled),
            (scorer, trained),
            samples=pair.samples,
            max_tokens=pair.max_tokens,
            enough=enough,
            looks=looks(),
            progress=_progress(len(prompts) * pair.samples, say),
        )
        return found, lone


async def _same_version(client: CompletionClient, wanted: str | None, say: _Say) -> None:
    """Hold the engine that answers against the one that is judged."""
    served, field = await client.version(), f"--kernel {client.endpoint.side}.version"
    if served and wanted and served != wanted:
        raise ValueError(f"{client.endpoint}: version {served} answers, and {field} says {wanted}")
    if served and not wanted:
        say(f"{client.endpoint}: version {served}; {field}={served} makes it part of the fingerprint")


def _check_writable(where: Path) -> None:
    """Check that the files can be written, before sampling costs time on two accelerators."""
    if format_of(where) == "parquet":
        arrow(where)
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
    reasons = Counter(failure.why for failure in failures)
    for why, times in reasons.most_common(_MAX_LISTED_REASONS):
        lines = sorted({failure.line for failure in failures if failure.why == why})
        more = f" and {len(lines) - 3:,} more" if len(lines) > 3 else ""
        count = f" ({times:,} times)" if times > 1 else ""
        yield f"  {prompts}: line {', '.join(map(str, lines[:3]))}{more}: {why}{count}"
    if len(reasons) > _MAX_LISTED_REASONS:
        yield f"  and {len(reasons) - _MAX_LISTED_REASONS:,} other reasons"
    yield "no verdict: prompts that fail are not a random sample, so the others could PASS because of their absence"
