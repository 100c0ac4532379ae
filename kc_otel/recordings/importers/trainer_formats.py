"""Trainers of files, and the sequences that these hold: a table of the formats that trainers write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers import batch_formats
from kc_otel.recordings.importers.imported import Imported, Records, imported, plain
from kc_otel.recordings.read_table import LinesRead, Problems, first_record, records
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_own

FormatName = Literal["verl", "slime", "skyrl", "roll", "prime-rl", "nemo-rl", "generic"]
FORMATS: Final[tuple[FormatName, ...]] = get_args(FormatName)
LINE_ENDINGS: Final = (".jsonl", ".jsonl.gz")
_BATCH_ENDINGS: Final = (".pkl", ".pickle", ".pt", ".pth", ".dp")
_ENDINGS: Final = (*LINE_ENDINGS, ".npz", ".parquet", *_BATCH_ENDINGS)
_NEMO_NAME: Final = re.compile(r"train_data_step(\d+)\.jsonl(\.gz)?$")
_PRIME_SCHEMA: Final = 1


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files that paths name: themselves, and of folders whatever could be imported, by name in natural order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file())
            found += sorted((file for file in inside if file.name.lower().endswith(_ENDINGS)), key=_natural)
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: there is no such file or folder")
    return list(dict.fromkeys(found))


def _natural(path: Path) -> list[int | str]:
    """Step 9 before step 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def format_of(path: Path) -> FormatName:
    """Return the format of a file, from its name and its begin."""
    name = path.name.lower()
    if name.endswith(_BATCH_ENDINGS):
        marked = (
            format for format, known in _TABLE.items() if known.marks and batch_formats.names_in(path, *known.marks)
        )
        return next(marked, "verl")
    if not name.endswith(LINE_ENDINGS):
        return "generic"
    keys = (first_record(path) or {}).keys()
    if {"input", "output", "step"} <= keys and keys.isdisjoint({"old_log_probs", "rollout_log_probs"}):
        raise RecordingError(
            f"{path}: is a dump of trainer.rollout_data_dir: text and scores without log-probabilities; set "
            f"rollout.calculate_log_probs=True and save batches with DataProto.save_to_disk"
        )
    for format, known in _TABLE.items():
        if known.keys and (known.keys <= keys or (known.name is not None and known.name.search(path.as_posix()))):
            return format
    return "generic"


def read_file(
    path: Path,
    refusals: Problems,
    format: FormatName | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    read: LinesRead | None = None,
) -> Iterator[Imported]:
    """Read the sequences of a file; records that cannot become one are `refusals`, by `contract.input_reasons`.

    `format` is None to find out whose it is; `columns` are for generic files. Lines that `read` counts are skipped, and
    it advances with each further one.
    """
    format = format or format_of(path)
    if format == "generic":
        yield from _generic(path, columns, read)
        return
    known = _TABLE[format]
    for place, make in known.records(path, read) if known.keys else known.records(path):
        try:
            found = make()
        except RecordingError:
            raise
        except KeyError as error:
            refusals.add(f"{place}: has no {error.args[0]}", kind="no_logprobs")
        except (ValueError, TypeError) as error:
            refusals.add(f"{place}: {error}", kind="shape_mismatch")
        else:
            if found is None:
                refusals.add(f"{place}: {known.masks} leave no token", kind="no_tokens")
            else:
                yield found


def _generic(path: Path, columns: Mapping[str, str] | None, read: LinesRead | None) -> Iterator[Imported]:
    """The sequences of a recording; a file with one bad sequence is refused as a whole."""
    log = load_own(path, columns, read)
    ends = np.cumsum(log.lengths)
    per_token = ("token_ids", "advantages", "train_kept", "versions")
    given = {name: values for name in per_token if (values := getattr(log, name)) is not None}
    for begin, end, attributes in zip(ends - log.lengths, ends, log.attributes, strict=True):
        here = slice(int(begin), int(end))
        numbers = {name: values[here] for name, values in given.items()}
        yield Imported(log.train[here], log.inference[here], attributes, **numbers)


def _lines(
    sequence: Callable[[Path, dict[str, Any], str], Imported | None], path: Path, read: LinesRead | None = None
) -> Records:
    for number, record in records(path, read):
        place = f"{path}:{number}"
        yield place, partial(sequence, path, record, place)


def _nemo_rl(path: Path, record: dict[str, Any], _: str) -> Imported | None:
    """A sample of NeMo-RL: `train_data_step{N}.jsonl` in the log folder.

    Source: NVIDIA-NeMo/RL at 7ea279abfbeb, nemo_rl/algorithms/grpo.py and grpo_sync.py (`log_data`: content, rewards,
    input_lengths, token_ids, token_loss_mask, sample_loss_mask, advantages, generation_logprobs, prev_logprobs),
    nemo_rl/utils/logger.py (`log_batched_dict_as_jsonl`). Samples are cut from the batch one at a time without dropping
    its axis, so that every value of a line is in a list of one; lines whose values were not wrapped are read too. Rows
    have the prompt, the completion and padding; entry t of both log-probabilities belongs to token t, and entry 0 is a
    filler. Versions that wrote no `token_loss_mask` say nowhere where the prompt ends, and are refused. No line says
    which weights sampled it, by token or by sample, nor does any of an asynchronous run: the replay buffer's
    `weight_version` is not written.
    """
    lone = {name: value[0] for name, value in record.items() if isinstance(value, list) and len(value) == 1}
    record = {**record, **lone}
    names = ("prev_logprobs", "generation_logprobs", "token_loss_mask")
    train, inference, mask = (_floats(record[name]) for name in names)
    kept = (mask != 0) & (float(record.get("sample_loss_mask", 1)) != 0)
    kept[:1] = False
    advantages = record.get("advantages")
    if advantages is not None:
        advantages = _floats(advantages) if isinstance(advantages, list) else np.full(kept.size, float(advantages))
    ids, prompt = record.get("token_ids"), _first(kept)
    named = _NEMO_NAME.search(path.name)
    step = int(named[1]) if named else None
    attributes: dict[str, Scalar] = {
        **plain({name: value for name, value in record.items() if name not in ("content", "idx")}),
        **({} if "rewards" not in record else {"reward": float(record["rewards"])}),
        **({} if step is None else {"step": step}),
        "prompt_tokens": prompt,
    }
    return imported(
        kept, train, inference, attributes, weights=(step, None), token_ids=ids, advantages=advantages,
        prompt_ids=ids and ids[:prompt],
    )  # fmt: skip


def _prime_rl(_: Path, record: dict[str, Any], place: str) -> Imported | None:
    """A trained sequence of prime-rl with `enable_token_export`: `token_exports/step_N/rank_R.jsonl`.

    Source: PrimeIntellect-ai/prime-rl at 559b44772e47, src/prime_rl/trainer/rl/token_export.py, schema version 1, and
    train.py (`mismatch_mask`). Lists have one entry per token of prompt and completion: token_ids, loss_mask,
    advantages, inference_logprobs, trainer_logprobs, what follows from them, and rl_weights, ce_weights and
    ref_kl_weights, which are null where a loss has no component. A number that is not finite is null. No line says
    which weights sampled it, by token or by sequence: the orchestrator knows (orchestrator/dispatcher.py,
    `policy_version`), and its micro-batches do not carry it to the trainer.
    """
    if (version := record.get("schema_version", _PRIME_SCHEMA)) != _PRIME_SCHEMA:
        said = f"{version!r} is not {_PRIME_SCHEMA}; use --format generic with --columns"
        raise RecordingError(f"{place}: schema_version: {said}")
    train, inference = _floats(record["trainer_logprobs"]), _floats(record["inference_logprobs"])
    kept = _prime_sampled(record)
    ids, prompt = record.get("token_ids"), _first(kept)
    step = record.get("export_step", record.get("step"))
    attributes: dict[str, Scalar] = {**plain(record), "prompt_tokens": prompt}
    if record.get("rewards") and np.isfinite(reward := _floats(record["rewards"])[prompt]):
        attributes["reward"] = float(reward)
    advantages = _floats(record["advantages"]) if record.get("advantages") else None
    if advantages is not None and np.all(np.isnan(advantages), where=kept):
        advantages = None
    return imported(
        kept, train, inference, attributes, weights=(step if isinstance(step, int) else None, None), token_ids=ids,
        advantages=advantages, prompt_ids=ids and ids[:prompt],
    )  # fmt: skip


def _prime_sampled(record: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which tokens are trained on and were sampled by the inference kernel.

    Tokens that neither rl_weights nor ref_kl_weights count were sampled by another model, which is distilled, and have
    no log-probability of the inference kernel. Until 004274ec964f, `losses` held a mask for each loss in place of
    weights.
    """
    if losses := record.get("losses"):
        return np.array([bool(loss.get("rl", {}).get("mask", False)) for loss in losses], dtype=np.bool_)
    kept = np.array(record["loss_mask"], dtype=np.bool_)
    rl, ref_kl = (_counted(record.get(name)) for name in ("rl_weights", "ref_kl_weights"))
    if rl is None:
        return kept
    return kept & (rl if ref_kl is None else rl | ref_kl)


def _counted(weights: list[float | None] | None) -> NDArray[np.bool_] | None:
    """Return where weights are not 0; None where the loss has no component."""
    if weights is None or all(weight is None for weight in weights):
        return None
    return np.asarray(np.nan_to_num(_floats(weights)) != 0.0)


def prime_rl_is_complete(path: Path) -> bool:
    """Return True if the folder of an export holds the file STABLE; files elsewhere count as complete."""
    return path.parent.parent.name != "token_exports" or (path.parent / "STABLE").exists()


def _first(kept: NDArray[np.bool_]) -> int:
    return int(next(iter(np.flatnonzero(kept)), 0))


def _floats(values: Any) -> NDArray[np.float64]:
    """A list of numbers; null is NaN, which is how a file without NaN writes it."""
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.60} is not a list of numbers")  # noqa: TRY004 - a wrong value in a file
    found = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    if found.ndim != 1:
        raise ValueError(f"has shape {found.shape}, not one number per token")
    return found


@dataclass(frozen=True, slots=True)
class _Format:
    """Reader of a trainer's files, the masks that leave out tokens, and how to tell its files.

    JSON lines are told by the `keys` of the first, or by the file's `name`, pickles by bytes in their begin, `marks`.
    """

    records: Callable[..., Records]
    masks: str
    keys: frozenset[str] = frozenset()
    name: re.Pattern[str] | None = None
    marks: tuple[bytes, ...] = ()


_TABLE: Final[Mapping[FormatName, _Format]] = {
    "skyrl": _Format(batch_formats.skyrl, "its masks", marks=(b"skyrl", b"_rebuild_tensor_batch")),
    "roll": _Format(batch_formats.roll, "its masks", marks=(b"roll.distributed.scheduler.protocol", b"DataProto")),
    "slime": _Format(batch_formats.slime, "loss_masks", marks=(b"rollout_id", b"samples")),
    "verl": _Format(batch_formats.verl, "its masks"),
    "prime-rl": _Format(
        partial(_lines, _prime_rl),
        "loss_mask and rl_weights",
        frozenset({"trainer_logprobs", "inference_logprobs", "loss_mask"}),
        re.compile(r"(^|/)step_[^/]*/rank_[^/]*$"),
    ),
    "nemo-rl": _Format(
        partial(_lines, _nemo_rl),
        "token_loss_mask and sample_loss_mask",
        frozenset({"prev_logprobs", "generation_logprobs"}),
        _NEMO_NAME,
    ),
}
