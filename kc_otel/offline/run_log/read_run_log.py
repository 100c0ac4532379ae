"""Scalars by step, from what trainers and their loggers leave behind, and the names that trainers give them.

Binary files are read without their packages. TensorBoard: TFRecord frames of `Event`, tensorflow/core/util/event.proto.
W&B: LevelDB's log in blocks of 32 KiB, with records of `Record` (wandb/proto/wandb_internal.proto). A run that was
killed leaves half a record at the end.

Each trainer's source, and the commit that its names are from, is in the handbook's reference on run logs. Of mean
differences: vLLM on a CPU against Transformers in float32, both of a small model, is 0.03 nats away in bfloat16, 0.15
with an fp8 KV cache, 0.24 with fp8 weights, and 0.43 with the weights of one step ago at a learning rate of 1e-3.
"""

from __future__ import annotations

import csv
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from kc_otel.contract.plain_text import read_json_text

RunLog = Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
"""Name -> steps that rise, int64 [n], and values, float64 [n]; of a step that was written twice, the last value."""

_STEPS: Final = (
    "training_step", "train/global_step", "trainer/global_step", "training/global_step", "global_step", "step",
    "train/step", "rollout/step", "iteration", "_step", "Step",
)  # fmt: skip
"""Names of a row's step: the trainer's, and last the logger's, which counts rows (Open-Instruct's global_step counts
episodes beside its training_step)."""
_TOKENS: Final = ("token_ids", "train_logprobs", "trainer_logprobs")
_TEXTS: Final = ({"input", "output"}, {"prompt", "completion"})
"""Keys of a rollout: lists of its tokens, and its texts, as verl and TRL name them."""
_CONSOLE: Final = re.compile(r"\bstep:(\d+) - (.+)")
_CONSOLE_PAIR: Final = re.compile(r"([^\s:]+):(?:np\.\w+\()?(-?(?:\d[\d.eE+-]*|nan|inf))\)?(?= - |\s*$)")
_MAX_FILE_BYTES: Final = 1 << 30
_MAX_STEP: Final = 1 << 53
_STEPS_APART: Final = 10
"""Steps of which two files say other numbers that make them two runs."""


class RunLogError(ValueError):
    """A file has an unknown format; the message names it and the known ones."""


def read_run_log(path: Path, say: Callable[[str], None] = lambda _: None) -> RunLog:
    """Scalars of a run by the trainer's step: of a file, or of every known file in a folder; `say` tells of repeats."""
    files = sorted(_logs_in(path)) if path.is_dir() else [path]
    if not files:
        raise RunLogError(
            f"{path}: holds no log that is known; give an events.out.tfevents.* file, run-*.wandb, a history as .csv "
            "or .jsonl, the console output of verl, or trainer_state.json"
        )
    found: dict[str, dict[int, float]] = {}
    before, longest = Path(), dict[str, dict[int, float]]()
    repeated: set[int] = set()
    for file in files:
        own: dict[str, dict[int, float]] = {}
        try:
            repeated |= _put(own, _scalars(file), in_order=True)
        except (ValueError, csv.Error, OverflowError) as error:
            raise RunLogError(f"{file}: {error}") from None
        whole = before.name == file.name == "trainer_state.json"
        if any(_are_two((longest if whole else found).get(name, {}), by, whole=whole) for name, by in own.items()):
            raise RunLogError(
                f"{before} and {file}: say other numbers of the same steps, as two runs do; give one of them"
            )
        scalars = ((step, name, value) for name, by in own.items() for step, value in by.items())
        repeated |= _put(found, scalars, in_order="tfevents" in file.name)  # each start of a run has a later name
        if own and not (whole and _steps(own) < _steps(longest)):
            before, longest = file, own
    if not found:
        raise RunLogError(f"{path}: holds no number by step; is it the log of another program?")
    if repeated:
        said = f"{len(repeated)} steps from {min(repeated)} to {max(repeated)}"
        say(f"{path}: earlier numbers of {said} do not count: they were logged again, as after a resume or a restart")
    return {name: _columns(by_step) for name, by_step in sorted(found.items())}


def _put(into: dict[str, dict[int, float]], scalars: Iterable[Scalar], *, in_order: bool = False) -> set[int]:
    """Add scalars; returns the steps of those that had another number before.

    Of scalars in the order in which they were logged, two earlier steps in a row that have other numbers than before
    begin the run anew from there: what had come later is not of this run. One alone is evaluated again.
    """
    repeated: set[int] = set()
    went_back: set[str] = set()
    newest = {name: max(by_step) for name, by_step in into.items()}
    for step, name, value in scalars:
        if not -_MAX_STEP < step < _MAX_STEP:
            raise RunLogError(f"{name} has the step {step:.3g}, which no run gets to")
        known = into.setdefault(name, {})
        if not _agree(known.get(step, value), value):
            anew = in_order and step < newest[name] and name in went_back
            later = [at for at in known if at > step] if anew else []
            repeated.update((step, *later))
            for at in later:
                del known[at]
            if anew:
                newest[name] = step
        (went_back.add if step < newest.get(name, step) else went_back.discard)(name)
        newest[name] = max(newest.get(name, step), step)
        known[step] = value
    return repeated


def _are_two(run: Mapping[int, float], other: Mapping[int, float], *, whole: bool) -> bool:
    """Return True if two files belong to different runs: a resumed run repeats only a few steps of the first.

    Where each holds the `whole` run up to its checkpoint, none may: those of a run that was taken back remain.
    """
    both = run.keys() & other.keys()
    apart = sum(not _agree(run[step], other[step]) for step in both)
    if whole:
        return apart > 1  # the last step alone may have been evaluated again
    return apart > 0.5 * min(len(run), len(other)) and apart >= _STEPS_APART


def _steps(run: Mapping[str, Mapping[int, float]]) -> int:
    return max(map(max, run.values()))


def _agree(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-12) or (math.isnan(value) and math.isnan(other))


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
    if (size := file.stat().st_size) > _MAX_FILE_BYTES:
        raise RunLogError(f"has {size >> 20} MiB; a log of scalars is never so large: export its history")
    data = file.read_bytes()
    if data.startswith(WANDB_MAGIC):
        return _rows(wandb_rows(data))
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
    return (
        (int(match[1]), name, float(value))
        for match in _CONSOLE.finditer(text)
        for name, value in _CONSOLE_PAIR.findall(match[2])
        if _number(value) is not None
    )


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
        if not isinstance(row, dict) or _is_rollout(row):
            continue
        values = {**row, **row["data"]} if isinstance(row.get("data"), dict) else row
        numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
        steps = {name: int(step) for name, step in numbers.items() if _is_step(name) and math.isfinite(step)}
        of_row = next((steps[name] for name in _STEPS if name in steps), None)
        for name, number in numbers.items():
            part = name.partition("/")[0]
            step = steps.get(f"{part}/step", steps.get(f"{part}/global_step", of_row))
            if step is not None and not _is_step(name) and not name.startswith("_"):
                yield step, name, number


def _is_rollout(row: Mapping[str, Any]) -> bool:
    """Return True for a rollout that lies beside a log."""
    return any(row.keys() >= keys for keys in _TEXTS) or any(isinstance(row.get(name), list) for name in _TOKENS)


def _is_step(name: str) -> bool:
    return name in _STEPS or name.endswith(("/step", "/global_step"))


def _csv(text: str) -> Iterator[Scalar]:
    lines = text.splitlines()
    head = lines[0] if lines else ""
    table = csv.DictReader(lines, delimiter=max(",;\t", key=head.count))
    columns = [name for name in table.fieldnames or () if " - " in name and not name.endswith(("__MIN", "__MAX"))]
    runs = list(dict.fromkeys(name.rpartition(" - ")[0] for name in columns if name.rpartition(" - ")[2] not in _STEPS))
    if len(runs) > 1:
        raise RunLogError(f"has the columns of {len(runs)} runs, {', '.join(runs[:5])}; export one run alone")
    # W&B's page writes a column "RUN - METRIC" for each run, and its extremes beside it.
    yield from _rows(
        {
            name.rpartition(" - ")[2]: value
            for name, value in row.items()
            if name and isinstance(value, str) and not name.endswith(("__MIN", "__MAX"))
        }
        for row in table
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


WANDB_MAGIC: Final = b":W&B\xe1\xbe"
_BLOCK_BYTES: Final = 32768
_HEADER_BYTES: Final = 7
_FULL, _FIRST, _LAST = 1, 2, 4
_FLOAT_OF_WIRE_TYPE: Final = {1: ("<Q", "<d"), 5: ("<I", "<f")}
"""Wire type of a fixed number -> its bits as a whole number, and what they are."""

Scalar = tuple[int, str, float]


def event_scalars(data: bytes) -> Iterator[Scalar]:
    """Scalars of an event file, as `add_scalar` and `tf.summary.scalar` write them."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        begin, at = at + 12, at + 16 + size
        if at > len(data):
            return
        event = dict(_fields(data[begin : begin + size]))
        if isinstance(summary := event.get(5), bytes):
            step = _signed(event.get(2, 0))
            for number, value in _fields(summary):
                if number == 1 and isinstance(value, bytes) and (found := _summary_value(value)) is not None:
                    yield step, *found


def wandb_rows(data: bytes) -> Iterator[dict[str, float]]:
    """Rows of the history in `run-*.wandb`; `_step` is W&B's count of them."""
    for record in _leveldb_records(data):
        for number, history in _fields(record):
            if number == 2 and isinstance(history, bytes):
                yield _history_row(history)


def _history_row(history: bytes) -> dict[str, float]:
    row: dict[str, float] = {}
    for number, value in _fields(history):
        if number == 2 and isinstance(value, bytes):
            row["_step"] = _signed(dict(_fields(value)).get(1, 0))
        elif number == 1 and isinstance(value, bytes):
            names, text = [], b""
            for field, content in _fields(value):
                if field in {1, 2} and isinstance(content, bytes):
                    names.append(content.decode("utf-8", "replace"))
                elif field == 16 and isinstance(content, bytes):
                    text = content
            with suppress(ValueError):  # W&B writes "NaN" and "Infinity" as texts
                if (scalar := _number(read_json_text(text))) is not None:
                    row.setdefault("/".join(filter(None, names)), scalar)
    return row


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    at, parts = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        begin, at = at + _HEADER_BYTES, at + _HEADER_BYTES + size
        if at > len(data) or kind == 0:
            return
        piece = data[begin:at]
        parts = piece if kind in {_FULL, _FIRST} else parts + piece
        if kind in {_FULL, _LAST}:
            yield parts


def _summary_value(data: bytes) -> tuple[str, float] | None:
    tag, found = "", None
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, float):
            found = value
        elif number == 8 and isinstance(value, bytes):
            found = _scalar_tensor(value)
    return (tag, found) if tag and found is not None else None


def _scalar_tensor(data: bytes) -> float | None:
    """A float32 (1) or float64 (2) TensorProto of one element."""
    fields = dict(_fields(data))
    if isinstance(content := fields.get(4), bytes) and len(content) in {4, 8}:
        return float(struct.unpack("<f" if len(content) == 4 else "<d", content)[0])
    for number, form in ((5, "<f"), (6, "<d")):
        value = fields.get(number)
        if isinstance(value, float):
            return value
        if isinstance(value, bytes) and len(value) == struct.calcsize(form):
            return float(struct.unpack(form, value)[0])
    return None


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """Numbers and values of a message's fields; a fixed 32-bit value as a float, and one of 64 bits as a double."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        raise ValueError("a record is cut or of another format") from None
    for field in fields:  # type: ignore[attr-defined]  # it is a sequence, which its stubs do not say
        if field.wire_type in _FLOAT_OF_WIRE_TYPE:
            whole, real = _FLOAT_OF_WIRE_TYPE[field.wire_type]
            yield field.field_number, struct.unpack(real, struct.pack(whole, field.data))[0]
        else:
            yield field.field_number, field.data


def _signed(value: bytes | float) -> int:
    number = value if isinstance(value, int) else 0
    return number - (1 << 64) if number >= 1 << 63 else number


Role = Literal["drift", "k1", "ratio", "tail", "largest", "ess", "entropy", "reward", "lag"]
Unit = Literal["nats", "kl", "probability", "factor"]
ABSURD: Final[Mapping[Unit, float]] = {"nats": 0.25, "kl": 0.05, "probability": 0.1, "factor": 0.28}
"""Means from which on two kernels hardly score the same tokens with the same weights: of |log P - log Q|, of k1 or k3
(half of the square, for errors with a Laplace law), of |P - Q|, and of exp |log P - log Q| - 1."""

UNITS: Final[Mapping[str, Unit]] = {
    "rollout_corr/k3_kl": "kl",
    "training/rollout_probs_diff_mean": "probability",
    "sampling/sampling_logp_difference/mean": "nats",
    "mismatch_kl/all/mean": "kl",
    "gen_kl_error": "kl",
    "token_mult_prob_error": "factor",
    "train_rollout_logprob_abs_diff": "nats",
    "policy/rollout_train_logprobs_abs_diff_mean": "nats",
    "policy/minibatch_rollout_logprobs_abs_diff_mean": "nats",
    "behave_approx_kl/avg": "kl",
    "actor/train_infer_diff_token_mean": "probability",
    "debug/vllm_vs_local_logprob_diff_mean": "nats",
    "rollout_corr/kl": "kl",
    "vllm_kl": "kl",
}
"""Unit of each drift; a signed mean is a size too, where nothing else is."""

ROLES: Final[Mapping[Role, tuple[str, ...]]] = {
    "drift": tuple(UNITS),
    "k1": ("rollout_corr/kl", "vllm_kl"),
    "ratio": (
        "rollout_corr/rollout_is_mean", "sampling/importance_sampling_ratio/mean", "sampling_importance_ratio",
        "tis", "mis_tis_weight_before_bound", "is_ratio_mean", "behave_imp_weight/avg",
        "actor/train_infer_ratio_token_mean", "val/rho_weight",
    ),
    "tail": (
        "training/rollout_probs_diff_max", "sampling/sampling_logp_difference/max", "mismatch_kl/all/max",
        "policy/rollout_train_logprobs_abs_diff_max", "policy/minibatch_rollout_logprobs_abs_diff_max",
        "debug/vllm_vs_local_logprob_diff_max",
    ),
    "largest": ("training/rollout_probs_diff_max",),
    "ess": ("rollout_corr/rollout_is_eff_sample_size",),
    "entropy": (
        "actor/entropy", "entropy", "entropy/all/mean", "approx_entropy", "entropy_loss", "policy_entropy",
        "update/entropy/avg", "critic/entropy/mean", "policy/entropy_avg",
    ),
    "reward": (
        "critic/score/mean", "critic/rewards/mean", "reward", "reward/mean", "rollout/raw_reward",
        "reward/avg_raw_reward", "task_reward/avg", "score/mean", "scores",
    ),
    "lag": (
        "training/off_policy/trajectory_staleness/mean", "off_policy/mean", "off_policy_level",
        "version_stats/sample_staleness_proximal_avg", "weights_lag", "staleness",
    ),
}  # fmt: skip
"""Role -> every trainer's names of it, with any prefix, the one to prefer first."""
