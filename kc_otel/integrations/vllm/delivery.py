"""Delivery of recorded requests from the engine's thread: to a spool on disk, or a recorder of the same process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

from kc_otel.contract.slices import Scalar
from kc_otel.integrations.vllm.completion import Completion, request_of
from kc_otel.integrations.vllm.request_attributes import AttributeFunction
from kc_otel.record.kernel import Kernel
from kc_otel.record.worker import BoundedWorker, PerProcess, ReasonCounts
from kc_otel.recordings.request import SampledRequest

_QUEUE_BYTES: Final = 64 << 20
"""Most bytes, by estimate, that wait."""
_TOKEN_BYTES: Final = 32
"""A reference and a number; prompts and completions wait as lists."""
_REQUEST_BYTES: Final = 2048
_WORKER_WAIT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Outcomes of the requests in this process.

    Attributes:
        seen: Completions that were started.
        sampled: Of these, the ones in the sample.
        recorded: Handed to the sink.
        tokens: Their sampled tokens.
        dropped: In the sample but not recorded, by reason: `queue-full`, `too-large`, `closed`, `sink-failed`,
            `invalid`, `aborted`, `error` (the engine's), `unsupported` (sessions, embeddings, images, replayed tokens),
            `failed` (ours).
        attributes_failed: Recorded without the attributes of the function that failed.
    """

    seen: int = 0
    sampled: int = 0
    recorded: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    attributes_failed: int = 0


class RequestDelivery(PerProcess):
    """Takes finished completions without waiting, and gives them to the sink on a thread of its own."""

    _lock: threading.Lock
    _counts: Counter[str]

    def __init__(self, sink: RequestSink, attributes: AttributeFunction) -> None:
        self.sink: Final = sink
        self._attributes = attributes
        self._dropped = ReasonCounts("kc-otel: a sampled request is not recorded (%s)")
        self._without_attributes = ReasonCounts("kc-otel: the %s function failed")
        self._worker: BoundedWorker[FinishedRequest] = BoundedWorker(
            self._record, self._dropped.add, name="kc-otel-vllm", max_bytes=_QUEUE_BYTES
        )
        super().__init__()

    def count(self, name: str, number: int = 1) -> None:
        """Count something that `stats` reports."""
        with self._lock:
            self._counts[name] += number

    def drop(self, reason: str, why: object) -> None:
        """Count a completion that is not recorded; `why` is logged the first time."""
        self._dropped.add(reason, why)

    def submit(self, finished: FinishedRequest) -> None:
        """Queue a completion that the engine has finished."""
        self._worker.put(lambda: finished, _REQUEST_BYTES + _TOKEN_BYTES * finished.numbers)

    def flush(self, timeout: float = 10.0) -> bool:
        """Hand everything submitted to the sink; return True if that was done within `timeout` seconds."""
        return self._worker.flush(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, and take no more."""
        return self._worker.close(timeout)

    def stats(self) -> CaptureStats:
        """Return the current counts."""
        with self._lock:
            counts = dict(self._counts)
        failed = self._without_attributes.values().get("attributes", 0)
        return CaptureStats(**counts, dropped=self._dropped.values(), attributes_failed=failed)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter()

    def _record(self, waiting: Sequence[FinishedRequest]) -> None:
        for finished in waiting:
            completion = finished.completion()
            kernel = finished.kernel.result(_WORKER_WAIT_SECONDS)
            try:
                request = request_of(completion, kernel, finished.logprobs_mode, self._own(completion))
            except ValueError as error:
                self.drop("invalid", error)
                continue
            try:
                self.sink.put(request)
            except Exception as error:  # noqa: BLE001 - sinks may be foreign code
                self.drop("sink-failed", error)
                continue
            self.count("recorded")
            self.count("tokens", request.token_ids.size)

    def _own(self, completion: Completion) -> Mapping[str, Scalar]:
        try:
            return dict(self._attributes(completion))
        except Exception as error:  # noqa: BLE001 - the user's function; the request still counts as traffic
            self._without_attributes.add("attributes", error)
            return {}


class FinishedRequest(Protocol):
    """Request that an engine has finished, on its way to the recording thread; `RequestCapture` is one."""

    @property
    def numbers(self) -> int:
        """Count of the numbers it holds, for the bound on the queue."""

    @property
    def kernel(self) -> Future[Kernel]:
        """Kernel that sampled it; awaited where the request is recorded."""

    @property
    def logprobs_mode(self) -> str:
        """`raw` or `processed`."""

    def completion(self) -> Completion:
        """The completion."""


class RequestSink(Protocol):
    """Takes recorded requests; `kc_otel.recordings.spool.Spool` is one."""

    def put(self, request: SampledRequest) -> None:
        """Take a request. Called from one thread of the instrumentation; should neither raise nor wait."""
