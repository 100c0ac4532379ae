"""Files of trainers: a declaration for each format, and the sequences that its records hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers import pickled_batches as batches
from kc_otel.recordings.read_table import LinesRead, Problems, RaggedTable, records
from kc_otel.recordings.recording import RecordingError, with_prompt

LINE_ENDINGS: Final = (".jsonl", ".jsonl.gz")
_BATCH_ENDINGS: Final = (".pkl", ".pickle", ".pt", ".pth", ".dp")
_ENDINGS: Final = (*LINE_ENDINGS, ".npz", ".parquet", *_BATCH_ENDINGS)
_OTHERS, _META = "other columns", "meta"
"""Keys in a batch's row: plain values of the columns that are no tensors, and what is said of the whole batch."""
_LONGEST_TEXT: Final = 200
"""Characters from which a text is content, not an attribute."""
_NEMO_NAME: Final = re.compile(r"train_data_step(\d+)\.jsonl(\.gz)?$")
_NEMO_VALIDATION: Final = re.compile(r"val_data_step\d+\.jsonl")
_SKYRL_NAME: Final = re.compile(r"global_step_(\d+)_training_input\.pkl$")
_PRIME_SCHEMA: Final = 1
_SLIME_VERSION: Final = 2
_SLIME_REMEDY: Final = (
    "dump with --save-debug-train-data, of rollouts that have log-probabilities (--use-tis or the like)"
)
_Records = Iterator[tuple[str, Mapping[str, Any]]]
"""Place in a file, and what is there."""
_Sequence = tuple[dict[str, Any], Mapping[str, Scalar]]
"""The mask of a sequence's tokens and what else there is by role, over the same tokens; and its attributes."""
_NAMES: Final = {"train": "train log-probabilities", "inference": "inference log-probabilities"}


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files that paths name: themselves, and of folders whatever could be imported, by name in natural order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(_ENDINGS))
            found += sorted((file for file in inside if not _is_unscored(file, path)), key=_natural)
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: there is no such file or folder")
    return list(dict.fromkeys(found))


def _is_unscored(file: Path, folder: Path) -> bool:
    """Return True for files without log P that trainers write beside the others: slime's rollouts, NeMo's validation.

    slime writes them with --dump-details; NeMo-RL's nemo_rl/algorithms/grpo.py names its own.
    """
    of_slime = file.suffix == ".pt" and file.parent != folder and file.parent.name == "rollout_data"
    return of_slime or _NEMO_VALIDATION.match(file.name) is not None


def _natural(path: Path) -> list[int | str]:
    """Step 9 before step 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def _lines(path: Path, read: LinesRead | None) -> _Records:
    return ((f"line {number}", record) for number, record in records(path, read))


def _batch(rows_of: Callable[[Path], batches.Batch]) -> Callable[[Path, LinesRead | None], _Records]:
    """Rows of a batch, with the plain values of other columns as `_OTHERS`, and what is said of all as `_META`."""

    def rows(path: Path, _: LinesRead | None) -> _Records:
        tensors, others, meta = rows_of(path)
        columns = {name: values for name, values in tensors.items() if values.ndim}
        count = max(map(len, columns.values()), default=0)
        for row in range(count):
            own = {name: values[row] for name, values in columns.items() if len(values) == count}
            plains = plain({name: values[row] for name, values in others.items() if len(values) == count})
            yield f"row {row}", {**own, _OTHERS: plains, _META: meta}

    return rows


@dataclass(frozen=True, slots=True)
class _TrainerFormat:
    """A trainer's files: the columns of log P, log Q and what else is `needed`, and the rest of a record's sequence.

    JSON lines are told by `keys`, pickles by `marks` in their begin; `hint` says how to have what is missing.
    """

    needed: tuple[str, ...]
    sequence: Callable[[Mapping[str, Any], Path], _Sequence]
    records: Callable[[Path, LinesRead | None], _Records] = _lines
    masks: str = "its masks"
    hint: str = ""
    keys: frozenset[str] = frozenset()
    marks: tuple[bytes, ...] = ()


def _verl(record: Mapping[str, Any], _path: Path) -> _Sequence:
    """A `DataProto` pickle of verl (`DataProto.save_to_disk`), or the same fields saved by `torch.save`.

    Source: verl 0.9.1 as released, and the same in verl-project/verl at 1dda039b9c63: verl/trainer/ppo/ray_trainer.py
    (`old_log_probs` log P at the start of the step, `rollout_log_probs` log Q with rollout.calculate_log_probs=True,
    `response_mask`, `responses`, `advantages`, `meta_info["temperature"]`), all of [sequences, response], whichever of
    FSDP or Megatron trains; verl/experimental/fully_async_policy/detach_utils.py (`min_global_steps` and
    `max_global_steps`, the oldest and the newest weights that a response was sampled with;
    workers/rollout/llm_server.py keeps no more of what it sampled in between, so that there is no version for each
    token, and the oldest stands for all). The weights are called by the step that made them: `old_log_probs` of step n
    are of version n - 1, which trainer/ppo/v1/trainer_base.py takes its staleness from.
    """
    others, meta = record[_OTHERS], record[_META]
    attention: Any = record.get("attention_mask")
    width = np.size(record["old_log_probs"])
    masks = [record[name] for name in ("response_mask", "loss_mask") if name in record]
    if not masks and attention is None:
        raise RecordingError(
            "has neither response_mask nor attention_mask, so that padding would count; save one of them"
        )
    scores: list[Any] = [record.get(name) for name in ("token_level_scores", "rm_scores")]
    step = _whole(meta.get("global_steps"))  # the one that the trainer is in, counted from 1
    attributes = {**plain({name: meta[name] for name in ("temperature",) if name in meta}), **others} | given(
        prompt_tokens=None if attention is None else int((attention[:-width] != 0).sum()),
        reward=next((float(values.sum()) for values in scores if np.ndim(values) == 1), None),
        step=step,
        train_weights=None if step is None else step - 1,
        inference_weights=_whole(others.get("min_global_steps")),
    )
    mask = np.logical_and.reduce([mask != 0 for mask in masks or [attention[-width:]]])
    columns = {"mask": mask, "token_ids": record.get("responses"), "advantages": record.get("advantages")}
    return columns, with_prompt(attributes, {"prompt_ids": record.get("prompts")})


def _skyrl(record: Mapping[str, Any], path: Path) -> _Sequence:
    """A batch of SkyRL with `trainer.dump_data_batch=true`: `dumped_data/global_step_N_training_input.pkl`.

    Source: NovaSky-AI/SkyRL 0.3.0 at a9564572eb8e, skyrl/train/trainer.py (`dump_data`, after log-probabilities and
    advantages are there; rewards are gone by then), skyrl/train/dataset/preprocess.py: `sequences` [sequences, prompt
    and response] are one block, padded on the left, and what is of responses alone, [sequences, response], too: before
    a response shorter than the longest stands the end of its prompt. `action_log_probs` are log P at the start of the
    step, `rollout_logprobs` log Q where the engine was asked for them (`generator.sampling_params.logprobs`); a token
    counts under `response_mask`, which begins where the response does, and `loss_mask` both.
    """
    step, mask = _step_in(_SKYRL_NAME, path), record["loss_mask"] != 0
    own, prompt = _split(record.get("sequences"), mask.size)
    response = record.get("response_mask", mask) != 0
    if own is not None:
        prompt = np.concatenate([prompt, own[: _first(response)]])
        prompt = prompt[np.asarray(record.get("attention_mask", np.ones(prompt.size)))[: prompt.size] != 0]
    attributes = given(step=step, train_weights=step, prompt_tokens=None if prompt is None else int(prompt.size))
    columns = {"mask": mask & response, "token_ids": own, "advantages": record.get("advantages")}
    return columns, with_prompt(attributes, {"prompt_ids": prompt})


def _slime(record: Mapping[str, Any], _: Path) -> _Sequence:
    """A sample of slime's dump with `--save-debug-train-data PATH` (or `--dump-details`): `{rollout_id}.pt`.

    Source: THUDM/slime 0.3.1 at 624b824a898a, slime/observability/train_data_utils.py (`_build_dump_payload`, format
    version 2: `samples`, a mapping for each, with tensors over the response's tokens), and actor.py beside the trainer:
    `log_probs` are log P, from the forward before training or that of training itself, `rollout_log_probs` log Q; both
    at the rollout's temperature. `raw_reward` is in the order of `rollout_position`. Weight versions are in the dump of
    rollouts (`--save-debug-rollout-data`) alone, which has no log P.
    """
    step, reward = record[_META]
    mask = np.asarray(record.get("loss_masks", np.ones(np.shape(record["log_probs"])))) != 0
    own, prompt = _split(record.get("tokens"), mask.size)
    named = plain({name: value for name, value in record.items() if name != "data_parallel_rank"})
    named |= given(prompt_tokens=0 if prompt is None else np.size(prompt), reward=reward, step=step, train_weights=step)
    columns = {"mask": mask, "token_ids": own, "advantages": record.get("advantages")}
    return columns, with_prompt(named, {"prompt_ids": prompt})


def _slime_samples(path: Path, _: LinesRead | None) -> Iterator[tuple[str, dict[str, Any]]]:
    dump = batches.torch_load(path, path.read_bytes())
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list) or dump.get("format_version") != _SLIME_VERSION:
        raise RecordingError(
            f"{path}: is no dump of slime's training data of format version {_SLIME_VERSION}; {_SLIME_REMEDY}"
        )
    rewards = dump.get("raw_reward")
    for row, sample in enumerate(samples):
        place = sample.get("rollout_position", row)
        reward = rewards[place] if isinstance(rewards, list) and place < len(rewards) else None
        said = float(reward) if isinstance(reward, int | float) else None
        own = {name: batches.arrays({name: value}).get(name, value) for name, value in sample.items()}
        yield f"sample {row}", {**own, _META: (_whole(dump.get("rollout_id")), said)}


def _nemo_rl(record: Mapping[str, Any], path: Path) -> _Sequence:
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
    kept = (floats(record["token_loss_mask"]) != 0) & (float(record.get("sample_loss_mask", 1)) != 0)
    kept[:1] = False
    advantages, rewards = record.get("advantages"), record.get("rewards")
    if advantages is not None:
        advantages = floats(advantages) if isinstance(advantages, list) else np.full(kept.size, float(advantages))
    ids, prompt, step = record.get("token_ids"), _first(kept), _step_in(_NEMO_NAME, path)
    named = plain({name: value for name, value in record.items() if name not in ("content", "idx")})
    reward = None if rewards is None else float(rewards)
    named |= given(reward=reward, step=step, prompt_tokens=prompt, train_weights=step)
    columns = {"mask": kept, "token_ids": ids, "advantages": advantages}
    return columns, with_prompt(named, {"prompt_ids": ids and ids[:prompt]})


def _nemo_lines(path: Path, read: LinesRead | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, record in _lines(path, read):
        lone = {name: value[0] for name, value in record.items() if isinstance(value, list) and len(value) == 1}
        yield place, {**record, **lone}


def _prime_rl(record: Mapping[str, Any], _path: Path) -> _Sequence:
    """A trained sequence of prime-rl with `enable_token_export`: `token_exports/step_N/rank_R.jsonl`.

    Source: PrimeIntellect-ai/prime-rl at 559b44772e47, src/prime_rl/trainer/rl/token_export.py, schema version 1, and
    train.py (`mismatch_mask`). Lists have one entry per token of prompt and completion: token_ids, loss_mask,
    advantages, inference_logprobs, trainer_logprobs, what follows from them, and rl_weights, ce_weights and
    ref_kl_weights, which are null where a loss has no component. A number that is not finite is null. No line says
    which weights sampled it, by token or by sequence: the orchestrator knows (orchestrator/dispatcher.py,
    `policy_version`), and its micro-batches do not carry it to the trainer.
    """
    if (version := record.get("schema_version", _PRIME_SCHEMA)) != _PRIME_SCHEMA:
        said = f"{version!r} is not {_PRIME_SCHEMA}; use --columns"
        raise RecordingError(f"schema_version: {said}")
    kept = _prime_sampled(record)
    ids, prompt = record.get("token_ids"), _first(kept)
    step = _whole(record.get("export_step", record.get("step")))
    attributes = plain(record) | given(prompt_tokens=prompt, train_weights=step)
    if record.get("rewards") and np.isfinite(reward := floats(record["rewards"])[prompt]):
        attributes["reward"] = float(reward)
    advantages = floats(record["advantages"]) if record.get("advantages") else None
    if advantages is not None and np.all(np.isnan(advantages), where=kept):
        advantages = None
    columns = {"mask": kept, "token_ids": ids, "advantages": advantages}
    return columns, with_prompt(attributes, {"prompt_ids": ids and ids[:prompt]})


def _prime_sampled(record: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return which tokens are trained on and were sampled by the inference kernel.

    Tokens that neither rl_weights nor ref_kl_weights count were sampled by another model, which is distilled, and have
    no log-probability of the inference kernel.
    """
    kept = np.array(record["loss_mask"], dtype=np.bool_)
    rl, ref_kl = (_counted(record.get(name)) for name in ("rl_weights", "ref_kl_weights"))
    if rl is None:
        return kept
    return kept & (rl if ref_kl is None else rl | ref_kl)


def _counted(weights: list[float | None] | None) -> NDArray[np.bool_] | None:
    """Return where weights are not 0; None where the loss has no component."""
    if weights is None or all(weight is None for weight in weights):
        return None
    return np.asarray(np.nan_to_num(floats(weights)) != 0.0)


def plain(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The values that can be attributes: truth values, numbers, and texts that are names rather than content."""
    found: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()  # noqa: PLW2901 - what NumPy keeps in an object array
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT):
            found[str(name)] = value
    return found


def given(**values: Scalar | None) -> dict[str, Scalar]:
    """The values that are there."""
    return {name: value for name, value in values.items() if value is not None}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _step_in(name: re.Pattern[str], path: Path) -> int | None:
    named = name.search(path.name)
    return int(named[1]) if named else None


def _split(ids: Any, own: int) -> tuple[Any, Any]:
    """Token ids of a response, the last ones, and of its prompt; None where there are none."""
    return (None, None) if ids is None else (ids[-own:], ids[:-own])


def _first(kept: NDArray[np.bool_]) -> int:
    return int(next(iter(np.flatnonzero(kept)), 0))


def floats(values: Any) -> NDArray[np.float64]:
    """A list of numbers; null is NaN, which is how a file without NaN writes it."""
    if not isinstance(values, list | np.ndarray | np.generic):
        raise ValueError(f"{values!r:.60} is not a list of numbers")  # noqa: TRY004 - a wrong value in a file
    listed = [np.nan if value is None else value for value in values] if isinstance(values, list) else values
    found = np.array(listed, dtype=np.float64)
    if found.ndim != 1:
        raise ValueError(f"has shape {found.shape}, not one number per token")
    return found


_TABLE: Final[Mapping[str, _TrainerFormat]] = {
    "skyrl": _TrainerFormat(
        ("action_log_probs", "rollout_logprobs", "loss_mask"),
        _skyrl,
        _batch(batches.skyrl_batch),
        hint="; set generator.sampling_params.logprobs=1 and let the trainer compute action_log_probs",
        marks=(b"skyrl", b"_rebuild_tensor_batch"),
    ),
    "slime": _TrainerFormat(
        ("log_probs", "rollout_log_probs"),
        _slime,
        _slime_samples,
        masks="loss_masks",
        hint=f"; {_SLIME_REMEDY}",
        marks=(b"rollout_id", b"samples"),
    ),
    "verl": _TrainerFormat(
        ("old_log_probs", "rollout_log_probs"),
        _verl,
        _batch(batches.verl_batch),
        hint="; set rollout.calculate_log_probs=True and save the batch after old_log_probs are computed",
    ),
    "prime-rl": _TrainerFormat(
        ("trainer_logprobs", "inference_logprobs"),
        _prime_rl,
        masks="loss_mask and rl_weights",
        keys=frozenset({"trainer_logprobs", "inference_logprobs", "loss_mask"}),
    ),
    "nemo-rl": _TrainerFormat(
        ("prev_logprobs", "generation_logprobs"),
        _nemo_rl,
        _nemo_lines,
        masks="token_loss_mask and sample_loss_mask",
        keys=frozenset({"prev_logprobs", "generation_logprobs"}),
    ),
}


def trainer_of(path: Path) -> str:
    """Return the trainer whose format a file has, from its begin; empty for a recording of one's own."""
    name = path.name.lower()
    if name.endswith(_BATCH_ENDINGS):
        marked = (trainer for trainer, known in _TABLE.items() if known.marks and batches.names_in(path, *known.marks))
        return next(marked, "verl")
    if not name.endswith(LINE_ENDINGS):
        return ""
    keys: set[str] = set()
    with suppress(RecordingError):  # which reading the file says, too
        keys = set(next((record for _, record in records(path)), {}))
    if {"input", "output", "step"} <= keys and keys.isdisjoint({"old_log_probs", "rollout_log_probs"}):
        raise RecordingError(
            f"{path}: is a dump of trainer.rollout_data_dir: text and scores without log-probabilities; set "
            f"rollout.calculate_log_probs=True and save batches with DataProto.save_to_disk"
        )
    return next((trainer for trainer, known in _TABLE.items() if known.keys and known.keys <= keys), "")


def trainer_table(trainer: str, path: Path, refusals: Problems, read: LinesRead | None = None) -> RaggedTable | None:
    """The sequences of a trainer's file, without the lines that `read` counts so far; None for none.

    Records that cannot become one are `refusals`; a file of nothing else is a RecordingError.
    """
    own = Problems(str(path))
    found = list(_sequences(_TABLE[trainer], path, read, own))
    for kind, count in own.counts.items():
        refusals.add(own.first[kind], kind=kind, times=count)
    if not found:
        if own.counts.keys() - {"no_tokens"}:
            raise RecordingError(*own.all())
        return None
    places, rows, attributes = zip(*found, strict=True)
    columns = {role: [row[role] for row in rows] for role in rows[0] if all(row[role] is not None for row in rows)}
    return RaggedTable(str(path), columns, _NAMES, attributes, places.__getitem__, trainer=trainer)


def _sequences(
    known: _TrainerFormat, path: Path, read: LinesRead | None, refusals: Problems
) -> Iterator[tuple[str, dict[str, Any], Mapping[str, Scalar]]]:
    """Yield the place, the columns by role and the attributes of each; a column of another shape is None."""
    for place, record in known.records(path, read):
        if missing := [name for name in known.needed if record.get(name) is None]:
            refusals.add(f"{place}: has no {' and no '.join(missing)}{known.hint}", kind="no_logprobs")
            continue
        try:
            train, inference = (floats(record[name]) for name in known.needed[:2])
            columns, attributes = known.sequence(record, path)
            mask = columns["mask"]
            for role, dtype in (("token_ids", np.int64), ("advantages", np.float64)):
                values = columns[role]
                columns[role] = None if np.shape(values) != mask.shape else np.asarray(values, dtype=dtype)
        except RecordingError as error:
            raise RecordingError(f"{path}: {place}: {error}") from None
        except KeyError as error:
            refusals.add(f"{place}: has no {error.args[0]}", kind="no_logprobs")
        except (ValueError, TypeError, IndexError) as error:
            refusals.add(f"{place}: {error}", kind="shape_mismatch")
        else:
            if not train.shape == inference.shape == mask.shape:
                sizes = f"{train.size}, {inference.size}, {mask.size}"
                refusals.add(f"{place}: log-probabilities and mask have {sizes} entries", kind="shape_mismatch")
            elif mask.any():
                yield place, {"train": train, "inference": inference, **columns}, attributes
            else:
                refusals.add(f"{place}: {known.masks} leave no token", kind="no_tokens")


def prime_rl_is_complete(path: Path) -> bool:
    """Return True if the folder of an export holds the file STABLE; files elsewhere count as complete."""
    return path.parent.parent.name != "token_exports" or (path.parent / "STABLE").exists()
