"""The offline stage with two live endpoints: sample, score, keep the recording, and have it judged like any other."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import httpx
import typer

from kc_otel.cli._gate_recorded import Asked, gate_files
from kc_otel.judge.promotion.stages import Outcome
from kc_otel.recordings import save_recording
from kc_otel.recordings.endpoints import (
    Collected,
    CompletionClient,
    CompletionEndpoint,
    CompletionEndpointError,
    Prompt,
    RefusedError,
    collect,
    read_prompts,
)
from kc_otel.recordings.load import format_of
from kc_otel.recordings.read_parquet import arrow

__all__ = ["Live", "gate_live"]

_EVERY_SECONDS: Final = 5.0
_REASONS: Final = 5
"""Different reasons for missing completions that are printed."""


@dataclass(frozen=True, slots=True)
class Live:
    """The options of `kc-otel gate --inference-url`."""

    inference_url: str
    train_url: str
    prompts: Path
    inference_model: str | None = None
    train_model: str | None = None
    samples: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    concurrency: int = 8
    timeout: float = 120.0
    record: Path | None = None


def gate_live(live: Live, asked: Asked) -> Outcome:
    """Record and judge; ends the program with 2 on what is unusable, and when a completion is missing."""
    return gate_files(asked, lambda: str(_recorded(live, asked)))


def _recorded(live: Live, asked: Asked) -> Path:
    """The recording's file.

    Raises:
        ValueError: If an option, the prompts or an endpoint cannot be used.
    """
    if live.temperature != 1.0:
        raise ValueError(
            f"--temperature: {live.temperature:g}: log-probabilities of given tokens are from before any temperature, "
            f"so both endpoints are compared at 1, with every token allowed; leave it out"
        )
    prompts = read_prompts(live.prompts)
    endpoints = (_endpoint("inference", live.inference_url), _endpoint("train", live.train_url))
    where = _where(live, asked)
    if where is not None:
        _check_writable(where)
    try:
        collected = asyncio.run(_collected(live, prompts, *endpoints))
    except CompletionEndpointError as error:
        raise ValueError(str(error)) from None
    if collected.recording is None:
        _missing(collected, None, live, asked)
    if where is None:
        where = Path(tempfile.mkdtemp(prefix="kc-otel-gate-")) / "recording.npz"
        _say("the recording is kept in a temporary folder; --record FILE or --evidence says where else")
    save_recording(collected.recording, where)
    tokens, sequences = collected.recording.train.size, collected.recording.lengths.size
    _say(f"recording: {where} ({sequences:,} completions, {tokens:,} tokens)")
    if collected.missing:
        _missing(collected, where, live, asked)
    return where


async def _collected(
    live: Live, prompts: tuple[Prompt, ...], inference: CompletionEndpoint, train: CompletionEndpoint
) -> Collected:
    limits = httpx.Limits(max_connections=2 * live.concurrency)
    async with httpx.AsyncClient(limits=limits) as http:
        sampler = CompletionClient(inference, http, timeout=live.timeout)
        scorer = CompletionClient(train, http, timeout=live.timeout)
        sampled, trained = await sampler.model(live.inference_model), await scorer.model(live.train_model)
        if (inference.root, sampled) == (train.root, trained):
            raise RefusedError(
                f"{train}: model {trained}: is the inference endpoint's too; a kernel does not drift from itself"
            )
        _say(f"sampling from {sampled} at the {inference}, scoring with {trained} at the {train}")
        return await collect(
            prompts,
            (sampler, sampled),
            (scorer, trained),
            samples=live.samples,
            max_tokens=live.max_tokens,
            concurrency=live.concurrency,
            progress=_progress(len(prompts) * live.samples),
        )


def _endpoint(side: str, url: str) -> CompletionEndpoint:
    key = os.environ.get(f"KC_OTEL_{side.upper()}_API_KEY", "").strip()
    return CompletionEndpoint("train" if side == "train" else "inference", url, key)


def _where(live: Live, asked: Asked) -> Path | None:
    """Where it was asked for; else beside the evidence that names its checksum; None for a folder of its own."""
    if live.record is not None or asked.evidence is None:
        return live.record
    if asked.evidence.suffix == ".json":
        return asked.evidence.with_suffix(".npz")
    return asked.evidence / "recording.npz"


def _check_writable(where: Path) -> None:
    """Before anything is sampled: that costs time on two accelerators.

    Raises:
        ValueError: If the name says no format, its library is missing, or no file can be written there.
    """
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


def _progress(asked: int) -> Callable[[int, int, int], None]:
    started = last = time.monotonic()

    def tell(done: int, failed: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _EVERY_SECONDS:
            last = now
            missing = f", {failed:,} failed" if failed else ""
            _say(f"  {done:,} of {asked:,} completions{missing}, {tokens / (now - started):,.0f} tokens/s")

    return tell


def _missing(collected: Collected, where: Path | None, live: Live, asked: Asked) -> NoReturn:
    """A verdict on what was answered would be about easier prompts than those that were given."""
    failures = collected.failures
    _say(f"{collected.missing:,} of {collected.asked:,} completions are missing, {len(failures):,} of them failed:")
    reasons = Counter(each.why for each in failures)
    for why, times in reasons.most_common(_REASONS):
        lines = sorted({each.line for each in failures if each.why == why})
        more = f" and {len(lines) - 3:,} more" if len(lines) > 3 else ""
        _say(
            f"  {live.prompts}: line {', '.join(map(str, lines[:3]))}{more}: {why}"
            + f" ({times:,} times)" * (times > 1)
        )
    if len(reasons) > _REASONS:
        _say(f"  and {len(reasons) - _REASONS:,} other reasons")
    _say("no verdict: what failed is no sample at random, and the rest may pass because of what it lacks")
    if where is not None:
        _say(f"to have the rest judged all the same: kc-otel gate --contract {asked.contract} {where}")
    raise typer.Exit(2)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
