"""Files of NeMo-RL: `train_data_step{N}.jsonl` in the log folder, one line per sample.

Source: NVIDIA-NeMo/RL at 7ea279abfbeb, nemo_rl/algorithms/grpo.py and grpo_sync.py (`log_data`: content, rewards,
input_lengths, token_ids, token_loss_mask, sample_loss_mask, advantages, generation_logprobs, prev_logprobs),
nemo_rl/utils/logger.py (`log_batched_dict_as_jsonl`). Samples are cut from the batch one at a time without dropping its
axis, so that every value of a line is in a list of one. Rows have the prompt, the completion and padding; entry t of
both log-probabilities belongs to token t, and entry 0 is a filler. Versions that wrote no `token_loss_mask` say nowhere
where the prompt ends, and are refused. No line says which weights sampled it, by token or by sample, nor does any of
an asynchronous run: the replay buffer's `weight_version` is not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Refusals, floats, plain
from kc_otel.recordings.read_jsonl import records

_NAME: Final = re.compile(r"train_data_step(\d+)\.jsonl(\.gz)?$")
_PER_TOKEN: Final = ("prev_logprobs", "generation_logprobs", "token_loss_mask")


def looks_like(path: Path, record: dict[str, Any] | None) -> bool:
    """Return True if a file with this name and first record is NeMo-RL's."""
    return bool(_NAME.search(path.name)) or (
        record is not None and {"prev_logprobs", "generation_logprobs"} <= set(record)
    )


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file.

    Raises:
        RecordingError: If a line is no JSON object.
    """
    named = _NAME.search(path.name)
    step = int(named[1]) if named else None
    for place, record in records(path):
        try:
            found = _sequence({name: _one(value) for name, value in record.items()}, step)
        except (KeyError, ValueError, TypeError) as error:
            reason, said = (
                ("no_logprobs", f"has no {error}") if isinstance(error, KeyError) else ("shape_mismatch", error)
            )
            refusals.add(reason, f"{place}: {said}")
            continue
        if found is None:
            refusals.add("no_tokens", f"{place}: token_loss_mask and sample_loss_mask leave no token")
        else:
            yield found


def _sequence(record: dict[str, Any], step: int | None) -> Imported | None:
    train, inference, mask = (floats(record[name]) for name in _PER_TOKEN)
    if not train.size == inference.size == mask.size:
        sizes = f"{train.size}, {inference.size}, {mask.size}"
        msg = f"{', '.join(_PER_TOKEN)} have {sizes} numbers; one for each token of the row is needed"
        raise ValueError(msg)
    kept = (mask != 0) & (float(record.get("sample_loss_mask", 1)) != 0)
    kept[:1] = False
    if not kept.any():
        return None
    given = record.get("advantages")
    advantages = None
    if given is not None:
        wide = floats(given) if isinstance(given, list) else np.full(train.size, float(given))
        advantages = np.broadcast_to(wide, train.shape)[kept]
    ids = record.get("token_ids")
    prompt = int(np.flatnonzero(kept)[0])
    attributes: dict[str, Scalar] = {
        **plain({name: value for name, value in record.items() if name not in ("content", "idx")}),
        **({} if "rewards" not in record else {"reward": float(record["rewards"])}),
        **({} if step is None else {"step": step}),
        "prompt_tokens": prompt,
    }
    return Imported(
        train[kept],
        inference[kept],
        None if ids is None else np.asarray(ids, dtype=np.int64)[kept],
        advantages,
        attributes,
        (step, None),
        prompt_ids=None if ids is None else np.asarray(ids[:prompt], dtype=np.int64),
    )


def _one(value: Any) -> Any:
    """Unwrap a list of one; lines whose values were not wrapped stay as they are."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
