"""The loop between spool and recorder: take, score, record, export, and only then forget.

    spool -> take -> refuse what cannot be compared
                  -> batches by kernel and length -> score -> Recorder.compare -> export -> done

A crash repeats what was not confirmed. A request that makes the score function fail by itself is counted and left
behind; when everything fails, or the kernel does not answer, the loop stops and the spool keeps it all.

TV(P, Q) = E_Q[(1-w)+] holds for tokens drawn from the very Q whose log-probabilities were kept: requests with those
from before temperature and top-p, and greedy ones, are refused.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kc_otel.contract.slices import LENGTH
from kc_otel.record.measure.arrays import floats
from kc_otel.record.measure.sampled import TOLERANCE
from kc_otel.record.pairing import content_key
from kc_otel.record.recorder import Recorder
from kc_otel.record.telemetry.recorder_points import RecorderStats
from kc_otel.recordings.confirmation import NO_ENDPOINT, why_unexported
from kc_otel.recordings.request import SUPPORTED, SampledRequest, effective, versions_per_token
from kc_otel.recordings.scoring import Scorer, UnavailableError, UnscorableError
from kc_otel.recordings.spool import SpoolReader

_log: Final = logging.getLogger("kc_otel")
_TAKEN_AT_ONCE: Final = 256
_FLUSH_SECONDS: Final = 10.0
_TRACES: Final = TraceContextTextMapPropagator()


_REMEDY: Final = {
    "sglang": "sample with return_sampling_mask, or without truncation and SGLANG_RETURN_ORIGINAL_LOGPROB"
}


class RescoreError(Exception):
    """Rescoring cannot go on; the spool keeps what was not confirmed."""


@dataclass(slots=True)
class RescoreTotals:
    """Requests scored, sampled tokens, tokens read for it, requests that left, refused ones, and why others stay."""

    requests: int = 0
    tokens: int = 0
    prefilled: int = 0
    confirmed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unexported: str = ""


class Rescorer:
    """Scores what a spool holds, and measures everything: sampling was done when the requests were kept.

    `weights` and `adapter` are the training kernel's; other requests are refused, as is processing that is not
    `supported`. `seen` gets what was scored and its log P. `poll` are seconds between looks at an empty spool.
    """

    def __init__(
        self,
        reader: SpoolReader,
        recorder: Recorder,
        score: Scorer,
        *,
        weights: int | str | None = None,
        adapter: str = "",
        supported: Sequence[str] = SUPPORTED,
        batch_tokens: int = 16_384,
        seen: Callable[[Sequence[SampledRequest], Sequence[Any]], None] | None = None,
        poll: float = 1.0,
    ) -> None:
        self.totals: Final = RescoreTotals()
        self._reader = reader
        self._recorder = recorder
        self._score = score
        self._takes_kept = "kept" in inspect.signature(score).parameters
        self._weights = weights
        self._adapter = adapter
        self._supported = supported
        self._batch_tokens = batch_tokens
        self._seen = seen
        self._poll = poll

    def run(self, stop: threading.Event, *, follow: bool = False) -> RescoreTotals:
        """Score until the spool is empty, or with `follow` until `stop` is set, or an export cannot be accepted."""
        while not stop.is_set() and not self.totals.unexported:
            taken = self._reader.take(_TAKEN_AT_ONCE)
            if taken:
                before = self._recorder.stats()
                self._confirm(self._rescore(taken, stop), before, stop)
            elif not follow:
                break
            else:
                stop.wait(self._poll)
        return self.totals

    def _rescore(self, taken: Sequence[tuple[int, SampledRequest]], stop: threading.Event) -> list[int]:
        """Numbers of the requests that are finished with: recorded, or refused."""
        finished, kept = [], []
        for number, request in taken:
            why = refusal(request, self._weights, self._adapter, self._supported)
            if why is None:
                kept.append((number, request))
            else:
                self._refuse(request, *why)
                finished.append(number)
        rollouts = Counter(content_key((), request.prompt_ids) for _, request in kept)
        for batch in batches([request for _, request in kept], self._batch_tokens):
            requests = [kept[index][1] for index in batch]
            if stop.is_set():
                break
            scored, logprobs = self._scored(requests)
            if scored:
                self._record(scored, logprobs, rollouts)
            finished += [kept[index][0] for index in batch]
        return finished

    def _scored(self, requests: Sequence[SampledRequest]) -> tuple[list[SampledRequest], list[Any]]:
        """The requests that could be scored, and their log-probabilities."""
        try:
            return list(requests), self._logprobs(requests)
        except UnavailableError as error:
            raise RescoreError(str(error)) from error
        except Exception as error:
            if len(requests) == 1 and not isinstance(error, UnscorableError):
                raise RescoreError(f"scoring request {requests[0].request_id} failed: {_described(error)}") from error
            failure = error
        found: list[tuple[SampledRequest, Any]] = []
        failures: list[tuple[SampledRequest, Exception]] = []
        for request in requests:
            try:
                found.append((request, self._logprobs([request])[0]))
            except UnavailableError as error:
                raise RescoreError(str(error)) from error
            except Exception as error:  # noqa: BLE001
                failures.append((request, error))
        if not found and not any(isinstance(error, UnscorableError) for _, error in failures):
            raise RescoreError(
                f"scoring failed on each of {len(requests)} requests: {_described(failure)}"
            ) from failure
        for request, failed in failures:
            self._refuse(request, "scoring_failed", f"the score function failed: {_described(failed)}")
        return [request for request, _ in found], [logprobs for _, logprobs in found]

    def _logprobs(self, requests: Sequence[SampledRequest]) -> list[Any]:
        kept = [request.kept for request in requests if request.kept is not None] if self._takes_kept else []
        found = self._score(
            [request.prompt_ids for request in requests],
            [request.token_ids for request in requests],
            effective(requests[0].processing),
            **({"kept": kept} if kept else {}),
        )
        return _checked(requests, found, 2 if kept else 1)

    def _record(self, requests: Sequence[SampledRequest], logprobs: Sequence[Any], rollouts: Mapping[str, int]) -> None:
        """Record requests, given how many rollouts each prompt has, by the name that its tokens give it."""
        first, prompts = requests[0], [content_key((), request.prompt_ids) for request in requests]
        processing = effective(first.processing)
        self._recorder.rollout(inference=first.kernel)
        masses = [logprob[1] for logprob in logprobs] if np.ndim(logprobs[0]) == 2 else None
        versions = [versions_per_token(request) for request in requests]
        self._recorder.compare(
            list(logprobs) if masses is None else [logprob[0] for logprob in logprobs],
            [request.logprobs for request in requests],
            token_ids=[request.token_ids for request in requests],
            attributes=[request.attributes for request in requests],
            processing=(processing, processing),
            kept=None if masses is None else (masses, None),
            weights=(self._weights, first.weights if versions[0] is None else versions),
            groups=prompts,
            group_size=[rollouts[prompt] for prompt in prompts],
            links=[link for request in requests if (link := _link(request.traceparent)) is not None],
            presampled=True,
        )
        if self._seen is not None:
            try:
                self._seen(requests, logprobs)
            except Exception as error:  # noqa: BLE001 - drift is measured whether or not anybody can look at it
                _log.warning("%s", _described(error))
                self._seen = None
        self.totals.requests += len(requests)
        self.totals.tokens += sum(int(request.token_ids.size) for request in requests)
        self.totals.prefilled += sum(length(request) for request in requests)

    def _confirm(self, numbers: Sequence[int], before: RecorderStats, stop: threading.Event) -> None:
        """Export what was recorded since the counts `before`, and then let go of the requests; until then they stay."""
        while why := why_unexported(self._recorder, before, _FLUSH_SECONDS):
            if why != NO_ENDPOINT or stop.wait(self._poll):
                self.totals.unexported = why
                return
        self._reader.done(numbers)
        self.totals.confirmed += len(numbers)

    def _refuse(self, request: SampledRequest, reason: str, why: str) -> None:
        self.totals.refused[reason] += 1
        attributes = {LENGTH: int(request.token_ids.size), **request.attributes}
        self._recorder.refuse(reason, why, attributes=attributes, inference=request.kernel)


def refusal(
    request: SampledRequest, weights: int | str | None = None, adapter: str = "", supported: Sequence[str] = SUPPORTED
) -> tuple[str, str] | None:
    """Return the counter's reason and a sentence with the remedy if a request cannot be compared; else None."""
    processing = effective(request.processing)
    if not request.token_ids.size:
        return "no_tokens", f"request {request.request_id} has no sampled tokens"
    if processing.get("temperature") == 0:
        return "greedy", "temperature is 0: nothing was sampled, so (1-w)+ estimates nothing; sample, or look at logits"
    if request.logprobs_mode == "raw" and processing:
        said = ", ".join(f"{name}={value}" for name, value in sorted(processing.items()))
        remedy = _REMEDY.get(request.kernel.engine, "start vLLM with --logprobs-mode processed_logprobs")
        return "raw_logprobs", f"drawn with {said}, but the log-probabilities are from before it; {remedy}"
    other = sorted(set(processing) - set(supported))
    if other:
        only = f"only {', '.join(supported)} can" if supported else "score it with `rescore --model`"
        return "unsupported_processing", f"{', '.join(other)} cannot be applied to the training kernel; {only}"
    if said := _wrong_weights(request, weights, adapter):
        return "wrong_weights", said
    return None


def _wrong_weights(request: SampledRequest, weights: int | str | None, adapter: str) -> str:
    if (served := str(request.attributes.get("lora", ""))) != adapter:
        sides = (f"the LoRA adapter {name!r}" if name else "no LoRA adapter" for name in (served, adapter))
        said = "sampled with {}, scored with {}".format(*sides)
        return f"{said}; score it with that adapter, and say its name (rescore --adapter)"
    if weights is not None and request.weights is not None and _other_weights(request.weights, weights):
        said = f"sampled with weights {request.weights!r}, scored with {weights!r}"
        return f"{said}; rescore with the checkpoint that served"
    return ""


def _other_weights(sampled: int | str | tuple[tuple[int, int], ...], scored: int | str) -> bool:
    """Return True if two versions differ and are not both steps, whose difference would be measured as a lag."""
    if isinstance(sampled, tuple):
        return any(_other_weights(step, scored) for step, _ in sampled)
    both_steps = isinstance(sampled, int) and isinstance(scored, int)
    return not both_steps and str(sampled) != str(scored)


def _checked(requests: Sequence[SampledRequest], logprobs: Sequence[Any], rows: int) -> list[Any]:
    if len(logprobs) != len(requests):
        raise RescoreError(f"the score function returned {len(logprobs)} arrays for {len(requests)} requests")
    for request, scores in zip(requests, logprobs, strict=True):
        if np.shape(scores) != (request.token_ids.shape if rows == 1 else (rows, request.token_ids.size)):
            more = "" if rows == 1 else ", and below these the log of the mass of the tokens that were kept"
            raise RescoreError(
                f"request {request.request_id}: the score function returned shape {np.shape(scores)} for "
                f"{request.token_ids.size} sampled tokens; return one log-probability per sampled token{more}"
            )
        values = floats(scores)
        wrong = values[~(values <= TOLERANCE)]
        if wrong.size:
            raise RescoreError(
                f"request {request.request_id}: the score function returned {wrong[0]:g}, which is no log-probability"
            )
    return list(logprobs)


def _link(traceparent: str) -> trace.SpanContext | None:
    if not traceparent:
        return None
    span = trace.get_current_span(_TRACES.extract({"traceparent": traceparent})).get_span_context()
    return span if span.is_valid else None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def length(request: SampledRequest) -> int:
    """Prompt and sampled tokens of a request."""
    return int(request.prompt_ids.size + request.token_ids.size)


def batches(requests: Sequence[SampledRequest], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the requests of each batch: alike, at most `batch_tokens` when padded; a longer request is one alone.

    The longest come first, so that a batch that does not fit the device fails at once and not after hours.
    """
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        groups[_alike(request)].append(index)
    for members in groups.values():
        members.sort(key=lambda index: -length(requests[index]))
        batch: list[int] = []
        for index in members:
            if batch and (len(batch) + 1) * length(requests[batch[0]]) > batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def _alike(request: SampledRequest) -> Hashable:
    several = isinstance(request.weights, tuple)
    processing = tuple(sorted(effective(request.processing).items()))
    return request.kernel, several or request.weights, several, processing, request.kept is None
