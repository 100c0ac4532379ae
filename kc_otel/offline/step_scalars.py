"""Verdicts on each step of a run that is over, as scalars by step for the trainer's own log.

A bulk import hands over hours within seconds, so that each step is judged for itself, as if it were all that there is.
"""

from __future__ import annotations

import json
import logging
from typing import Final, TextIO

from opentelemetry import trace

from kc_otel.client.training_log import SilentExporter, TrainingLog
from kc_otel.contract.model import Contract
from kc_otel.record.recorder import Recorder

_log: Final = logging.getLogger("kc_otel")
_FLUSH_SECONDS: Final = 60.0


class StepScalars:
    """A recorder for each step that is being read, and its scalars once it is, as a line of JSON each.

    A step ends with the first file after it that holds nothing of it; later sequences are `late`. Of `unjudged` steps
    the contract says nothing: there is too little of them.
    """

    def __init__(self, contract: Contract, file: TextIO) -> None:
        self.written: Final[set[int]] = set()
        self.unjudged: Final[set[int]] = set()
        self.late = 0
        self._contract = contract
        self._file = file
        self._open: dict[int, Recorder] = {}
        self._read: set[int] = set()

    def recorder(self, step: int) -> Recorder | None:
        """Return the recorder for sequences of a step; None if the step has ended."""
        if step in self.written or step in self.unjudged:
            self.late += 1
            return None
        self._read.add(step)
        if step not in self._open:
            self._open[step] = Recorder(
                self._contract,
                sampling=1.0,
                metric_exporter=SilentExporter(),
                tracer_provider=trace.NoOpTracerProvider(),
                log=TrainingLog(),
            )
        return self._open[step]

    def flush(self) -> None:
        """Measure what was handed over, so that no queue fills."""
        for recorder in self._open.values():
            recorder.force_flush(_FLUSH_SECONDS)

    def end_of_file(self) -> None:
        """Write the steps of which the file that was read holds nothing."""
        for step in sorted(self._open.keys() - self._read):
            self._end(step)
        self._read.clear()

    def close(self) -> None:
        """Write what is left."""
        for step in sorted(self._open):
            self._end(step)

    def _end(self, step: int) -> None:
        recorder = self._open.pop(step)
        flushed = recorder.force_flush(_FLUSH_SECONDS)
        found = recorder.scalars()
        recorder.shutdown()
        if not flushed:
            _log.warning("step %d was not judged in time and is not in the log", step)
        if flushed and found:
            self.written.add(step)
            self._file.write(json.dumps({"step": step, **found}) + "\n")
            self._file.flush()
        else:
            self.unjudged.add(step)
