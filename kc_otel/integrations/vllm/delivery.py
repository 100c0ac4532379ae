"""From the engine's thread to the sink: a bounded queue, a thread of its own, and counts of everything left out.

Where recorded requests go: a spool on disk, or a recorder of the same process.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

from kc_otel.contract.slices import Scalar
from kc_otel.integrations.vllm.completion import Completion, request_of
from kc_otel.integrations.vllm.request_attributes import AttributeFunction
from kc_otel.record.kernel import Kernel
from kc_otel.record.recorder import Recorder
from kc_otel.record.worker import WorkQueue
from kc_otel.recordings.request import SampledRequest

__all__ = ["CaptureStats", "RecorderSink", "RequestDelivery", "RequestSink"]


_log = logging.getLogger(__name__)
Make = Callable[[], Completion]
_TOKEN_BYTES: Final = 32
"""A reference and a number; prompts and completions wait as lists."""
_REQUEST_BYTES: Final = 2048
_WAIT_FOR_WORKERS: Final = 60.0


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What became of requests in this process.

    Attributes:
        seen: Completions that were started.
        sampled: Of these, the ones in the sample.
        recorded: Handed to the sink.
        tokens: Their sampled tokens.
        dropped: In the sample but not recorded, by reason: `queue-full`, `sink-failed`, `invalid`, `aborted`, `error`
            (the engine's), `unsupported` (sessions, embeddings, images, replayed tokens), `failed` (ours).
        attributes_failed: Recorded without the attributes of the function that failed.
    """

    seen: int = 0
    sampled: int = 0
    recorded: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    attributes_failed: int = 0


class RequestDelivery:
    """Takes finished completions without waiting, and gives them to the sink on a thread of its own.

    The thread is started with the first completion, in the process that has one.

    Args:
        sink: Where requests go.
        attributes: What makes their attributes.
        queue_bytes: Most bytes, by estimate, that wait.
    """

    def __init__(self, sink: RequestSink, attributes: AttributeFunction, *, queue_bytes: int = 64 << 20) -> None:
        self.sink: Final = sink
        self._attributes = attributes
        self._queue_bytes = queue_bytes
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._thread: threading.Thread | None = None
        self._start()

    def count(self, name: str, number: int = 1) -> None:
        """Count something that `stats` reports."""
        with self._lock:
            self._counts[name] += number

    def drop(self, reason: str, why: object) -> None:
        """Count a completion that is not recorded; `why` is logged the first time."""
        with self._lock:
            self._dropped[reason] += 1
            first = reason not in self._logged
            self._logged.add(reason)
        if first:
            said = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else why
            _log.warning("kc-otel: a sampled request is not recorded (%s): %s; further ones are counted", reason, said)

    def submit(self, make: Make, tokens: int, kernel: Future[Kernel], logprobs_mode: str) -> None:
        """Hand a completion over.

        Args:
            make: What makes it, called on the thread of the hand-over.
            tokens: Numbers that it holds, for the bound on what waits.
            kernel: What sampled it; may still be asked for, and is waited for on our side.
            logprobs_mode: `raw` or `processed`.
        """
        if self._pid != os.getpid():
            self._start()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._queue,), name="kc-otel-vllm", daemon=True)
            self._thread.start()
        size = _REQUEST_BYTES + _TOKEN_BYTES * tokens
        if self._queue.reserve(size):
            self._queue.put((make, kernel, logprobs_mode), size)
        else:
            self.drop("queue-full", "requests finish faster than the sink takes them")

    def flush(self, timeout: float = 10.0) -> bool:
        """Give what was handed over to the sink; whether that was done within `timeout` seconds."""
        return self._pid != os.getpid() or self._thread is None or self._queue.drain(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, and take no more."""
        atexit.unregister(self.close)
        done = self.flush(timeout)
        self._queue.close()
        return done

    def stats(self) -> CaptureStats:
        """The counts now."""
        with self._lock:
            return CaptureStats(**self._counts, dropped=dict(self._dropped))

    def _start(self) -> None:
        """A queue of this process; threads and what they held do not survive a fork."""
        self._pid = os.getpid()
        self._lock = threading.Lock()  # whoever held it in the parent does not exist here
        self._queue: WorkQueue[tuple[Make, Future[Kernel], str]] = WorkQueue(self._queue_bytes)
        self._thread = None
        atexit.register(self.close)

    def _work(self, queue: WorkQueue[tuple[Make, Future[Kernel], str]]) -> None:
        while not queue.finished:
            item = queue.get(None)
            if item is None:
                continue
            (make, kernel, mode), size = item
            try:
                self._record(make(), kernel, mode)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next completion is another one
                self.drop("failed", error)
            finally:
                queue.done(size)

    def _record(self, completion: Completion, kernel: Future[Kernel], mode: str) -> None:
        try:
            request = request_of(completion, kernel.result(_WAIT_FOR_WORKERS), mode, self._own(completion))
        except ValueError as error:
            self.drop("invalid", error)
            return
        try:
            self.sink.put(request)
        except Exception as error:  # noqa: BLE001 - sinks may be foreign code
            self.drop("sink-failed", error)
            return
        self.count("recorded")
        self.count("tokens", request.token_ids.size)

    def _own(self, completion: Completion) -> Mapping[str, Scalar]:
        try:
            return dict(self._attributes(completion))
        except Exception as error:  # noqa: BLE001 - the user's function; the request still counts as traffic
            self.count("attributes_failed")
            if "attributes" not in self._logged:
                self._logged.add("attributes")
                _log.warning("kc-otel: the attributes function failed (%s: %s)", type(error).__name__, error)
            return {}


class RequestSink(Protocol):
    """Takes recorded requests; `kc_otel.recordings.spool.Spool` is one."""

    def put(self, request: SampledRequest) -> None:
        """Take a request. Called from one thread of the instrumentation; should neither raise nor wait."""


class RecorderSink:
    """Hands requests to a recorder of this process, where training scores them: the `sampled` side of its pairs.

    The training side calls `recorder.scored(token_ids=..., logprobs=..., prompt_ids=...)` without keys, so that both
    sides are named by what they hold. The recorder takes its share by that name; record every request
    (`sampling=1.0`), or the shares multiply.

    Args:
        recorder: Whose pairs they become. Its inference kernel becomes the one that the engine turned out to be.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._kernel: Kernel | None = None

    def put(self, request: SampledRequest) -> None:
        """Hand a request over."""
        if request.kernel != self._kernel:
            self.recorder.rollout(inference=request.kernel)
            self._kernel = request.kernel
        self.recorder.sampled(
            token_ids=request.token_ids,
            logprobs=request.logprobs,
            prompt_ids=request.prompt_ids,
            attributes=request.attributes,
            # Log-probabilities from before processing are those of a request without any.
            processing={} if request.logprobs_mode == "raw" else request.processing,
            weights=request.weights,
        )
