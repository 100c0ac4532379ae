"""A batch of verl as the recorder takes it, the watches that record one, and the kernels of verl's configuration."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.integrations import Around, listen, wrap
from kc_otel.record.kernel import Kernel
from kc_otel.record.recorder import Recorder
from kc_otel.record.slice_table import asked_for
from kc_otel.record.telemetry.environment import resource_of_run
from kc_otel.record.work import Processing, Weights
from kc_otel.record.worker import ReasonCounts
from kc_otel.recordings.request import effective

_log: Final = logging.getLogger("kc_otel")
_OF_TENSORS: Final = {"prompt_tokens", "completion_tokens", "audit"}  # attributes that are no columns
_SCALARS: Final = (str, bool, int, float, np.generic)
_SAMPLING_NAMES: Final = ("temperature", "top_p", "top_k", "repetition_penalty")
_PROCESSED: Final = "processed"


class Watch:
    """A watch that records batches; its faults are counted by its recorder, and the first is logged before it has one.

    `make` makes the recorder from the two kernels, when there is first one.
    """

    watched = "batch"
    """Subject of one call, for the log."""
    wrappers: Mapping[str, Mapping[str, Callable[[Any, str], object]]]
    """Wrappers by the name of a module and of its function."""

    def __init__(self, contract: Contract, make: Callable[..., Recorder] = Recorder) -> None:
        self._recorder: Recorder | None = None
        self._faults = ReasonCounts("kc-otel: a %s of verl was not recorded")
        self._contract = contract
        self._make = make
        self._columns = sorted(asked_for(contract) - _OF_TENSORS)
        self._wants_prompt_tokens = "prompt_tokens" in asked_for(contract)

    def attach(self, module: Any) -> None:
        """Wrap what is watched in a module of `wrappers`, by plain functions: workers are pickled by reference."""
        try:
            for path, put in self.wrappers[module.__name__].items():
                owner, _, name = path.rpartition(".")
                put(getattr(module, owner) if owner else module, name)
        except AttributeError as error:
            _log.error("kc-otel: %s is not as expected, and is not watched: %s", module.__name__, error)

    def around(self, function: Around) -> Callable[[Any, str], object]:
        """Wrap a function by another, as `wrap` does."""
        return partial(wrap, around=function)

    def hook(self, **listeners: Callable[..., object]) -> Callable[[Any, str], object]:
        """Look at its calls, as `listen` does."""
        return partial(listen, failed=self.failed, **listeners)

    def guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns; None where it raises."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the trainer must not fail because somebody watches
            return self.failed(error)

    def failed(self, error: Exception) -> None:
        """Count a fault, so that the trainer goes on."""
        if self._recorder is None:
            self._faults.add(self.watched, error)
        else:
            self._recorder.drop("rollout-unusable", f"{type(error).__name__}: {error}")

    def flush(self) -> None:
        """Export what was recorded."""
        if self._recorder is not None:
            self.guarded(self._recorder.force_flush)

    def _record_batch(
        self, logged: LoggedBatch, config: Any, trained: Weights, rollouts: Mapping[str, int] | None = None
    ) -> None:
        """Compare a batch.

        `config` is verl's, None where it is not known, `trained` the training side's weights, and `rollouts` the number
        of each prompt's rollouts, by its name, where it has more than this batch holds.
        """
        if self._recorder is None:
            said: Mapping[str, Any] = {}
            if config is not None:
                train, inference = kernels(config)
                algorithm = config.get("algorithm", {}).get("adv_estimator")
                run = resource_of_run("verl", algorithm, config.actor_rollout_ref.get("model", {}).get("path"))
                said = {"train": train, "inference": inference, "resource": run}
            self._recorder = self._make(self._contract, **said)
            atexit.register(self.flush)  # before the recorder's own end: it was registered earlier
        rows = np.flatnonzero(np.ones(len(logged.attributes), bool) if logged.kept is None else logged.kept)
        if not rows.size:
            return

        def of_kept(values: Any) -> Any:
            if isinstance(values, list):
                return [values[row] for row in rows.tolist()]
            return None if values is None else values[rows]

        prompts = of_kept(logged.prompts)
        steps = of_kept(list(logged.versions)) if logged.versions else [None]
        versions = [None if step is None else int(step) for step in steps]
        sampled = versions[0] if len(set(versions)) == 1 else None if None in versions else np.array(versions, np.int64)
        names = ("mask", "token_ids", "attributes", "advantages", "rewards")
        self._recorder.compare(
            of_kept(logged.train),
            of_kept(logged.inference),
            **{name: of_kept(getattr(logged, name)) for name in names},
            processing=None if config is None else processings(config),
            weights=(trained, sampled),
            groups=prompts,
            group_size=None if prompts is None or rollouts is None else [rollouts[prompt] for prompt in prompts],
        )


@dataclass(slots=True)
class LoggedBatch:
    """Batch that verl compares, [sequences, tokens], stored until verl knows rewards and advantages.

    `train` are the trainer's log-probabilities at the weights that the step began with, and `mask` is from before
    verl's rejection takes tokens out of it. `versions` are the steps of the oldest weights that sampled each sequence,
    `kept` the rows that are no padding of verl's own, `prompts` one name for all rollouts of a prompt.
    """

    train: Any
    inference: Any
    mask: Any
    token_ids: Any
    attributes: list[dict[str, Scalar]]
    rewards: Any = None
    advantages: Any = None
    versions: Sequence[int | None] = ()
    kept: np.ndarray | None = None
    prompts: list[str] | None = None

    @classmethod
    def of(cls, data: Any) -> LoggedBatch:
        """Read the argument of `calculate_debug_metrics`: a `verl.DataProto`."""
        batch = data.batch
        width = batch["responses"].size(1)
        mask = batch.get("response_mask", batch.get("attention_mask"))
        rows = len(batch["responses"])
        attributes = attributes_of(data.non_tensor_batch, rows)
        if "attention_mask" in batch and batch["attention_mask"].size(1) > width:
            for row, prompt in zip(attributes, batch["attention_mask"][:, :-width].sum(1).tolist(), strict=True):
                row["prompt_tokens"] = int(prompt)
        logged = cls(
            batch["old_log_probs"],
            batch["rollout_log_probs"],
            None if mask is None else mask[:, -width:],
            batch["responses"],
            attributes,
        )
        uids = data.non_tensor_batch.get("uid")
        if uids is not None and len(uids) == rows:
            logged.prompts = [str(getattr(uid, "data", uid)) for uid in uids]
        versions = data.non_tensor_batch.get("min_global_steps")
        if versions is not None and len(versions) == rows:
            logged.versions = list(versions)
        return logged

    @classmethod
    def audited(cls, data: Any, train: Any, tags: Sequence[Mapping[str, Any]], names: Iterable[str]) -> LoggedBatch:
        """Sequences of v1's TransferQueue that the training kernel has scored; `names` are columns for attributes."""
        mask = padded(data["response_mask"])
        given = {name: column(data, name) for name in sorted(names) if name in data}
        own = [{"prompt_tokens": int(tag.get("prompt_len", 0)), "audit": True} for tag in tags]
        return cls(
            padded(train, mask.shape),
            padded(data["rollout_log_probs"], mask.shape),
            mask,
            padded(data["responses"], mask.shape),
            [{**row, **more} for row, more in zip(attributes_of(given, len(tags)), own, strict=True)],
            versions=[tag.get("min_global_steps") for tag in tags],
            prompts=[str(name) for name in column(data, "uid")],
        )

    def rewarded(self, scores: Any, advantages: Any) -> None:
        """Add rewards, [sequences, tokens] as verl spreads them, and advantages of each token, if there are any."""
        if scores is not None:
            self.rewards = scores.sum(-1)
        if advantages is not None and tuple(advantages.shape) == tuple(self.train.shape):
            self.advantages = advantages


def attributes_of(columns: Mapping[str, Any], rows: int) -> list[dict[str, Scalar]]:
    """Columns of a batch that hold one text, number or truth value for each sequence, such as `data_source`."""
    found: list[dict[str, Scalar]] = [{} for _ in range(rows)]
    for name, values in columns.items():
        if name == "uid" or len(values) != rows:
            continue
        for row, given in zip(found, values, strict=True):
            value = given if isinstance(given, _SCALARS) else getattr(given, "data", given)  # tensordict's wrapper
            if isinstance(value, _SCALARS):
                row[name] = value.item() if isinstance(value, np.generic) else value
    return found


def column(data: Any, name: str) -> list[Any]:
    """Return a value for each sequence; tensordict stores one for all if they are the same."""
    found = data[name]
    if isinstance(found, str | bool | int | float | Mapping | np.generic):
        return [found] * len(data)
    return [getattr(item, "data", item) for item in found]


def padded(values: Any, shape: Any = None) -> Any:
    """Return a tensor [sequences, tokens]; a nested one is padded to the shape, or to its own width without one."""
    return values.to_padded_tensor(0, output_size=shape and tuple(shape)) if values.is_nested else values


def kernels(config: Any) -> tuple[Kernel, Kernel]:
    """The training and the inference kernel as `actor_rollout_ref` of verl's whole configuration has them."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    strategy = str(actor.get("strategy", "torch"))
    engine = actor.get("fsdp_config") or {}
    train = Kernel(
        strategy,
        version=_installed("torch"),
        dtype=engine.get("dtype") or engine.get("model_dtype"),
        parallelism=f"sp={actor.ulysses_sequence_parallel_size}"
        if actor.get("ulysses_sequence_parallel_size")
        else None,
        extra={"verl": _installed("verl")},
    )
    name = str(rollout.get("name", "vllm"))
    arguments = (rollout.get("engine_kwargs") or {}).get(name) or {}
    inference = Kernel(
        name,
        version=_installed(name),
        dtype=rollout.get("dtype"),
        quantization=rollout.get("quantization") or arguments.get("quantization"),
        kv_cache_dtype=arguments.get("kv_cache_dtype"),
        attention=arguments.get("attention_backend"),
        compile="eager" if rollout.get("enforce_eager") else None,
        parallelism=f"tp={rollout.tensor_model_parallel_size}" if rollout.get("tensor_model_parallel_size") else None,
    )
    return train, inference


def processings(config: Any) -> tuple[Processing, Processing]:
    """Return the sampling parameters that both sides' log-probabilities include.

    verl's trainer divides logits by the temperature; the engine's are from after all of its processing, unless
    `logprobs_mode` says otherwise.
    """
    rollout = config.actor_rollout_ref.rollout
    temperature: dict[str, Scalar] = {"temperature": float(rollout.get("temperature", 1.0))}
    sampled: dict[str, Scalar] = {name: rollout.get(name) for name in _SAMPLING_NAMES if rollout.get(name) is not None}
    processed = str(rollout.get("logprobs_mode") or _PROCESSED).startswith(_PROCESSED)
    return effective(temperature), effective(sampled if processed else {})


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
