"""Scalars by step, from what trainers and their loggers leave behind."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.json_text import read_json_text
from kc_otel.offline.run_log.binary_logs import WANDB_MAGIC, Scalar, event_scalars, wandb_scalars

__all__ = ["RunLog", "RunLogError", "read_run_log"]

RunLog = Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
"""Name -> steps that rise, int64 [n], and values, float64 [n]; of a step that was written twice, the last value."""

_STEPS: Final = ("step", "_step", "Step", "global_step", "train/global_step", "trainer/global_step", "iteration")
_CONSOLE: Final = re.compile(r"\bstep:(\d+) - (.+)")
_PAIR: Final = re.compile(r"([^\s:]+):(?:np\.\w+\()?(-?(?:\d[\d.eE+-]*|nan|inf))\)?(?= - |\s*$)")
_MOST_BYTES: Final = 1 << 30
_FAR: Final = 1 << 53
_RUN: Final = 10
"""Steps of which two files say other numbers that make them two runs."""


class RunLogError(ValueError):
    """A file is no log that is known; the message names it and what would be."""


def read_run_log(path: Path) -> RunLog:
    """Scalars of a run.

    Read are TensorBoard's event files, W&B's offline files (`run-*.wandb`) and histories exported as .csv or .jsonl,
    verl's .jsonl and console output, and `trainer_state.json` of Transformers and TRL. Of a folder, every such file
    that is in it, the same step of the last one counting.

    Raises:
        RunLogError: If there is no such file, none holds a number by step, or there are those of several runs.
        OSError: If a file cannot be read.
    """
    files = sorted(_logs_in(path)) if path.is_dir() else [path]
    if not files:
        raise RunLogError(
            f"{path}: holds no log that is known; give an events.out.tfevents.* file, run-*.wandb, a history as .csv "
            "or .jsonl, verl's console output, or trainer_state.json"
        )
    found: dict[str, dict[int, float]] = {}
    before: Path | None = None
    for file in files:
        own: dict[str, dict[int, float]] = {}
        try:
            for step, name, value in _scalars(file):
                if not -_FAR < step < _FAR:
                    raise RunLogError(f"{name} has the step {step:.3g}, which no run gets to")
                own.setdefault(name, {})[step] = value
        except (ValueError, csv.Error, OverflowError) as error:
            raise RunLogError(f"{file}: {error}") from None
        if any(_are_two(found.get(name, {}), by_step) for name, by_step in own.items()):
            raise RunLogError(
                f"{before} and {file}: say other numbers of the same steps, as two runs do; give one of them"
            )
        for name, by_step in own.items():
            found.setdefault(name, {}).update(by_step)
        before = file if own else before
    if not found:
        raise RunLogError(f"{path}: holds no number by step; is it the log of another program?")
    return {name: _columns(by_step) for name, by_step in sorted(found.items())}


def _are_two(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether two files say another number of most steps: one that was gone on with says a few of them anew."""
    both = one.keys() & other.keys()
    apart = sum(not math.isclose(one[step], other[step], rel_tol=1e-4, abs_tol=1e-12) for step in both)
    return apart > 0.5 * min(len(one), len(other)) and apart >= _RUN


def _columns(by_step: Mapping[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    steps = sorted(by_step)
    return np.array(steps, dtype=np.int64), np.array([by_step[step] for step in steps])


def _logs_in(folder: Path) -> Iterator[Path]:
    known = (".wandb", ".csv", ".jsonl", ".log")
    for file in folder.rglob("*"):
        if file.is_file() and (
            file.suffix in known or "tfevents" in file.name or file.name in {"trainer_state.json", "output.log"}
        ):
            yield file


def _scalars(file: Path) -> Iterable[Scalar]:
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise RunLogError(f"has {size >> 20} MiB; a log of scalars is never so large: export its history")
    data = file.read_bytes()
    if data.startswith(WANDB_MAGIC):
        return wandb_scalars(data)
    if "tfevents" in file.name:
        return event_scalars(data)
    text = data.decode("utf-8-sig", "replace")
    if file.suffix == ".csv":
        return _csv(text)
    if file.suffix == ".json":
        state = read_json_text(text)
        history = state.get("log_history") if isinstance(state, dict) else state
        if not isinstance(history, list):
            raise RunLogError("has no list log_history; give trainer_state.json")
        return _rows(history)
    if file.suffix == ".jsonl":
        return _rows(_lines(text))
    return _console(text)


def _lines(text: str) -> Iterator[Any]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield read_json_text(line)
        except ValueError as error:
            if number == len(lines):
                return  # a run that was killed while it wrote
            raise RunLogError(f"line {number}: is not JSON ({error})") from None


def _rows(rows: Iterable[Any]) -> Iterator[Scalar]:
    for row in rows:
        if isinstance(row, dict):
            step = next((row[name] for name in _STEPS if name in row), None)
            values = row["data"] if isinstance(row.get("data"), dict) else row
            if (at := _number(step)) is not None and math.isfinite(at):
                yield from _values(int(at), values)


def _values(step: int, values: Mapping[str, Any]) -> Iterator[Scalar]:
    for name, value in values.items():
        if name not in _STEPS and (number := _number(value)) is not None:
            yield step, str(name), number


def _csv(text: str) -> Iterator[Scalar]:
    lines = text.splitlines()
    head = lines[0] if lines else ""
    table = csv.DictReader(lines, delimiter=max(",;\t", key=head.count))
    columns = [name for name in table.fieldnames or () if " - " in name and not name.endswith(("__MIN", "__MAX"))]
    runs = list(dict.fromkeys(name.rpartition(" - ")[0] for name in columns if name.rpartition(" - ")[2] not in _STEPS))
    if len(runs) > 1:
        raise RunLogError(f"has the columns of {len(runs)} runs, {', '.join(runs[:5])}; export one run alone")
    for row in table:
        # W&B's page writes a column "RUN - METRIC" for each run, and its extremes beside it.
        values = {
            name.rpartition(" - ")[2]: value
            for name, value in row.items()
            if name and isinstance(value, str) and not name.endswith(("__MIN", "__MAX"))
        }
        step = next((at for name in _STEPS if (at := _number(values.get(name))) is not None), None)
        if step is not None and math.isfinite(step):
            yield from _values(int(step), values)


def _console(text: str) -> Iterator[Scalar]:
    for line in text.splitlines():
        if match := _CONSOLE.search(line):
            for name, value in _PAIR.findall(match[2]):
                if (number := _number(value)) is not None:
                    yield int(match[1]), name, number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None
