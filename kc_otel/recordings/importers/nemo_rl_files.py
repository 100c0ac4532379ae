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
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Refusals, cut, floats, line_rows, plain

_NAME: Final = re.compile(r"train_data_step(\d+)\.jsonl(\.gz)?$")
_PER_TOKEN: Final = ("prev_logprobs", "generation_logprobs", "token_loss_mask")


def looks_like(path: Path, record: dict[str, Any] | None) -> bool:
    """Return True if a file with this name and first record is NeMo-RL's."""
    return bool(_NAME.search(path.name)) or (
        record is not None and {"prev_logprobs", "generation_logprobs"} <= set(record)
    )


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file; errors as `detect.read_file`."""
    named = _NAME.search(path.name)
    sequence = partial(_sequence, int(named[1]) if named else None)
    return line_rows(path, refusals, sequence, "token_loss_mask and sample_loss_mask")


def _sequence(step: int | None, record: dict[str, Any], _: str) -> Imported | None:
    record = {name: _one(value) for name, value in record.items()}
    train, inference, mask = (floats(record[name]) for name in _PER_TOKEN)
    kept = (mask != 0) & (float(record.get("sample_loss_mask", 1)) != 0)
    kept[:1] = False
    advantages = record.get("advantages")
    if advantages is not None:
        advantages = floats(advantages) if isinstance(advantages, list) else np.full(kept.size, float(advantages))
    ids, prompt = record.get("token_ids"), int(next(iter(np.flatnonzero(kept)), 0))
    attributes: dict[str, Scalar] = {
        **plain({name: value for name, value in record.items() if name not in ("content", "idx")}),
        **({} if "rewards" not in record else {"reward": float(record["rewards"])}),
        **({} if step is None else {"step": step}),
        "prompt_tokens": prompt,
    }
    return cut(kept, train, inference, ids, advantages, ids and ids[:prompt], attributes, (step, None))


def _one(value: Any) -> Any:
    """Unwrap a list of one; lines whose values were not wrapped stay as they are."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
