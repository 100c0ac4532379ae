"""What prime-rl writes with `enable_token_export`: `token_exports/step_N/rank_R.jsonl`, one line per trained sequence.

Source: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py at 004274ec964f, schema version 1. Lists
have one entry per token of prompt and completion: token_ids, loss_mask, advantages, losses, inference_logprobs,
trainer_logprobs and what follows from them; a number that is not finite is null. `losses` holds, where it is written,
a mask for each loss: only tokens of the loss `rl` were sampled by the inference kernel. A folder is complete when it
holds a file STABLE. No line says which weights sampled it, by token or by sequence (the same file at 559b44772e47): the
orchestrator knows (orchestrator/dispatcher.py, `policy_version`), and its micro-batches do not carry it to the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals, floats, plain
from kc_otel.recordings.importers.json_lines import records

__all__ = ["complete", "looks_like", "read"]

_SCHEMA = 1


def looks_like(path: Path, record: dict[str, Any] | None) -> bool:
    """Whether a file with this name and first record is prime-rl's."""
    named = path.name.startswith("rank_") and path.parent.name.startswith("step_")
    return named or (record is not None and {"trainer_logprobs", "inference_logprobs", "loss_mask"} <= set(record))


def complete(path: Path) -> bool:
    """Whether nothing is written to a file any more; anywhere but in a folder of exports nobody says so."""
    return path.parent.parent.name != "token_exports" or (path.parent / "STABLE").exists()


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file.

    Raises:
        ImportFileError: If a line is no JSON object, or of another schema version.
    """
    for place, record in records(path):
        if record.get("schema_version", _SCHEMA) != _SCHEMA:
            said = record["schema_version"]
            msg = f"{place}: schema_version: {said!r} is not {_SCHEMA}; use --format generic with --columns"
            raise ImportFileError(msg)
        try:
            found = _sequence(record)
        except KeyError as error:
            refusals.add("no_logprobs", f"{place}: has no {error}")
            continue
        except (ValueError, TypeError) as error:
            refusals.add("shape_mismatch", f"{place}: {error}")
            continue
        if found is None:
            refusals.add("no_tokens", f"{place}: loss_mask leaves no token that was sampled")
        else:
            yield found


def _sequence(record: dict[str, Any]) -> Imported | None:
    train, inference = floats(record["trainer_logprobs"]), floats(record["inference_logprobs"])
    kept = _sampled(record)
    if not train.size == inference.size == kept.size:
        msg = (
            f"trainer_logprobs, inference_logprobs, loss_mask have {train.size}, {inference.size}, {kept.size} entries"
        )
        raise ValueError(msg)
    if not kept.any():
        return None
    advantages = floats(record["advantages"]) if record.get("advantages") else None
    rewards = floats(record["rewards"])[kept] if record.get("rewards") else np.empty(0)
    ids = record.get("token_ids")
    step = record.get("export_step", record.get("step"))
    attributes: dict[str, Scalar] = {
        **plain(record),
        "prompt_tokens": int(np.flatnonzero(kept)[0]),
        "tokens": int(kept.sum()),
    }
    if rewards.size and np.isfinite(rewards[0]):
        attributes["reward"] = float(rewards[0])
    return Imported(
        train[kept],
        inference[kept],
        None if ids is None else np.asarray(ids, dtype=np.int64)[kept],
        None if advantages is None or np.isnan(advantages[kept]).all() else advantages[kept],
        attributes,
        (step if isinstance(step, int) else None, None),
    )


def _sampled(record: dict[str, Any]) -> NDArray[np.bool_]:
    losses = record.get("losses")
    if losses:
        return np.array([bool(each.get("rl", {}).get("mask", False)) for each in losses], dtype=np.bool_)
    return np.array(record["loss_mask"], dtype=np.bool_)
