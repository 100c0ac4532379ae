"""Where recorded requests go: a spool on disk, or a recorder of the same process."""

from __future__ import annotations

from typing import Protocol

from kc_otel.instrument.recorder import Recorder
from kc_otel.instrument.request import SampledRequest
from kc_otel.telemetry.kernel import Kernel

__all__ = ["RecorderSink", "Sink"]


class Sink(Protocol):
    """Takes recorded requests; `kc_otel.instrument.spool.Spool` is one."""

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
