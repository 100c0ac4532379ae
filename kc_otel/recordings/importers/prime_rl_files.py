"""Files of prime-rl with `enable_token_export`: `token_exports/step_N/rank_R.jsonl`, a line per trained sequence.

Source: PrimeIntellect-ai/prime-rl at 559b44772e47, src/prime_rl/trainer/rl/token_export.py, schema version 1, and
train.py (`mismatch_mask`). Lists have one entry per token of prompt and completion: token_ids, loss_mask, advantages,
inference_logprobs, trainer_logprobs, what follows from them, and rl_weights, ce_weights and ref_kl_weights, which are
null where a loss has no component. A number that is not finite is null. Tokens that neither rl_weights nor
ref_kl_weights count were sampled by another model, which is distilled, and have no log-probability of the inference
kernel. Until 004274ec964f, `losses` held a mask for each loss in place of weights. A folder is complete when it holds a
file STABLE. No line says which weights sampled it, by token or by sequence: the orchestrator knows
(orchestrator/dispatcher.py, `policy_version`), and its micro-batches do not carry it to the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Refusals, cut, floats, line_rows, plain
from kc_otel.recordings.recording import RecordingError

_SCHEMA = 1


def looks_like(path: Path, record: dict[str, Any] | None) -> bool:
    """Return True if a file with this name and first record is prime-rl's."""
    named = path.name.startswith("rank_") and path.parent.name.startswith("step_")
    return named or (record is not None and {"trainer_logprobs", "inference_logprobs", "loss_mask"} <= set(record))


def complete(path: Path) -> bool:
    """Return True if a file is complete; outside a folder of exports, files count as complete."""
    return path.parent.parent.name != "token_exports" or (path.parent / "STABLE").exists()


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file; errors as `detect.read_file`."""
    return line_rows(path, refusals, _sequence, "loss_mask and rl_weights")


def _sequence(record: dict[str, Any], place: str) -> Imported | None:
    if (version := record.get("schema_version", _SCHEMA)) != _SCHEMA:
        said = f"{version!r} is not {_SCHEMA}; use --format generic with --columns"
        raise RecordingError(f"{place}: schema_version: {said}")
    train, inference = floats(record["trainer_logprobs"]), floats(record["inference_logprobs"])
    kept = _sampled(record)
    ids, prompt = record.get("token_ids"), int(next(iter(np.flatnonzero(kept)), 0))
    step = record.get("export_step", record.get("step"))
    attributes: dict[str, Scalar] = {**plain(record), "prompt_tokens": prompt}
    if record.get("rewards") and np.isfinite(reward := floats(record["rewards"])[prompt]):
        attributes["reward"] = float(reward)
    advantages = floats(record["advantages"]) if record.get("advantages") else None
    if advantages is not None and np.all(np.isnan(advantages), where=kept):
        advantages = None
    weights = (step if isinstance(step, int) else None, None)
    return cut(kept, train, inference, ids, advantages, ids and ids[:prompt], attributes, weights)


def _sampled(record: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which tokens are trained on and were sampled by the inference kernel."""
    if losses := record.get("losses"):
        return np.array([bool(loss.get("rl", {}).get("mask", False)) for loss in losses], dtype=np.bool_)
    kept = np.array(record["loss_mask"], dtype=np.bool_)
    rl, ref_kl = (_counted(record.get(name)) for name in ("rl_weights", "ref_kl_weights"))
    if rl is None and ref_kl is None:
        return kept
    sampled = kept if rl is None else rl
    return kept & (sampled if ref_kl is None else sampled | ref_kl)


def _counted(weights: list[float | None] | None) -> NDArray[np.bool_] | None:
    """Return where weights are not 0; None where the loss has no component."""
    if weights is None or all(weight is None for weight in weights):
        return None
    return np.asarray(np.nan_to_num(floats(weights)) != 0.0)
