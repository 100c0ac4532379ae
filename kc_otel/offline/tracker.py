"""The logs that trainers keep, written from outside of the trainer: scalars by step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["TRACKERS", "Tracker"]

_Write = Callable[[int, Mapping[str, float]], None]
TRACKERS: Final = {
    "tensorboard": "DIR",
    "wandb": "PROJECT/RUN_ID",
    "mlflow": "RUN_ID",
    "trackio": "PROJECT/RUN",
}
"""What is named after the colon of `KIND:NAME`."""


class Tracker(AbstractContextManager["Tracker"]):
    """One log, which is made where it is not there yet and continued where it is.

    Args:
        target: `KIND:NAME` with a kind of `TRACKERS`, or the name of a .jsonl file that gets a line for each step.

    Raises:
        ValueError: If it is neither, or the library of that kind is not installed.
        OSError: If a file cannot be written.
    """

    def __init__(self, target: str) -> None:
        kind, colon, name = target.partition(":")
        self._closing = ExitStack()
        try:
            if colon and name and kind in TRACKERS:
                self.write: _Write = _OPENED[kind](name, self._closing)
            elif target.endswith(".jsonl"):
                self.write = _json_lines(target, self._closing)
            else:
                forms = ", ".join(f"{each}:{what}" for each, what in TRACKERS.items())
                raise ValueError(f"{target}: is no log that can be written; write FILE.jsonl or one of {forms}")
        except ModuleNotFoundError as error:
            raise ValueError(f"{target}: needs {error.name}: pip install {kind}, or write a FILE.jsonl") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def _json_lines(name: str, closing: ExitStack) -> _Write:
    file = closing.enter_context(Path(name).open("a", encoding="utf-8"))  # noqa: SIM115 - it is one

    def write(step: int, values: Mapping[str, float]) -> None:
        file.write(json.dumps({"step": step, **values}) + "\n")
        file.flush()

    return write


def _tensorboard(name: str, closing: ExitStack) -> _Write:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - only where it is asked for
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    events = EventFileWriter(name, filename_suffix=".kc")
    closing.callback(events.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        events.flush()

    return write


def _wandb(name: str, closing: ExitStack) -> _Write:
    import wandb  # noqa: PLC0415 - only where it is asked for

    project, run_id = _two("wandb", name)
    run = closing.enter_context(wandb.init(project=project, id=run_id, resume="allow"))
    # The run's own steps only grow, and have passed: these have an axis of their own.
    run.define_metric("kc/step", hidden=True)
    run.define_metric("kc/*", step_metric="kc/step")
    return lambda step, values: run.log({"kc/step": step, **values})


def _mlflow(name: str, closing: ExitStack) -> _Write:  # noqa: ARG001 - nothing to close
    from mlflow import MlflowClient  # noqa: PLC0415 - only where it is asked for
    from mlflow.entities import Metric  # noqa: PLC0415

    client = MlflowClient()
    client.get_run(name)

    def write(step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(name, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    return write


def _trackio(name: str, closing: ExitStack) -> _Write:
    import trackio  # noqa: PLC0415 - only where it is asked for

    project, run = _two("trackio", name)
    trackio.init(project=project, name=run, resume="allow")
    closing.callback(trackio.finish)

    def write(step: int, values: Mapping[str, Any]) -> None:
        trackio.log(dict(values), step=step)

    return write


def _two(kind: str, name: str) -> tuple[str, str]:
    first, slash, second = name.rpartition("/")
    if not (first and slash and second):
        raise ValueError(f"{kind}:{name}: is not {kind}:{TRACKERS[kind]}")
    return first, second


_OPENED: Final[Mapping[str, Callable[[str, ExitStack], _Write]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
