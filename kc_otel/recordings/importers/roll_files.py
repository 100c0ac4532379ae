"""A pickled `DataProto` of ROLL that holds both kernels' log-probabilities.

Source: alibaba/ROLL 0.3.0 at 8eb27cc2dc34, roll/distributed/scheduler/protocol.py (`DataProto.__getstate__`: a
`torch.save`d TensorDict in a BytesIO, other columns, remote ones, what is said of the batch),
roll/pipeline/rlvr/rlvr_pipeline.py: `old_log_probs` are log P at the start of the step, `infer_logprobs` log Q, both
[sequences, tokens - 1] with entry t of token t + 1, under `response_mask` [sequences, tokens]. What ROLL dumps by
itself (`rollout_mock` with mode `dump`) is from before the trainer has scored anything: pickle the batch after
`old_log_probs`. Its text dumps (`rollout_dump_dir`) have no log-probabilities.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals, plain
from kc_otel.recordings.importers.safe_pickle import arrays, names_in, torch_load, unpickled

__all__ = ["looks_like", "read"]

_NEEDED: Final = ("old_log_probs", "infer_logprobs", "response_mask")


def looks_like(path: Path) -> bool:
    """Whether a pickle is ROLL's."""
    return names_in(path, b"roll.distributed.scheduler.protocol", b"DataProto")


def read(path: Path, refusals: Refusals, *, trust: bool = False) -> Iterator[Imported]:
    """The sequences of a file.

    Raises:
        ImportFileError: If it holds something else, or has not both kernels' log-probabilities.
        OSError: If it cannot be read.
    """
    state = getattr(unpickled(path, path.read_bytes(), "roll", trust=trust), "state", None)
    if not (isinstance(state, tuple) and len(state) == 4 and isinstance(state[0], io.BytesIO)):
        raise ImportFileError(f"{path}: holds no DataProto of ROLL; pickle the batch itself")
    batch = arrays(torch_load(path, state[0].getvalue(), trust=False))
    if missing := [name for name in _NEEDED if name not in batch]:
        raise ImportFileError(
            f"{path}: has no {' and no '.join(missing)}, only {', '.join(sorted(batch))}; rollout_mock dumps before "
            "the trainer has scored: pickle the batch after old_log_probs, of an engine that returns log-probabilities"
        )
    train, inference = (batch[name].astype(np.float64) for name in _NEEDED[:2])
    mask = batch["response_mask"][:, 1:] != 0
    if train.ndim != 2 or not train.shape == inference.shape == mask.shape:
        shapes = ", ".join(str(each.shape) for each in (train, inference, mask))
        raise ImportFileError(f"{path}: {', '.join(_NEEDED)} have shapes {shapes}, not one [sequences, tokens - 1]")
    others, meta = dict(state[1] or {}), dict(state[3] or {})
    step = meta.get("global_step")
    ids, advantages = batch.get("input_ids"), batch.get("advantages")
    scores = batch.get("response_level_rewards", batch.get("scores"))
    for row, kept in enumerate(mask):
        if not kept.any():
            refusals.add("no_tokens", f"{path}: row {row}: response_mask leaves no token")
            continue
        given = plain({name: values[row] for name, values in others.items() if len(values) == train.shape[0]})
        if scores is not None and scores.ndim == 1:
            given["reward"] = float(scores[row])
        yield Imported(
            train[row][kept],
            inference[row][kept],
            None if ids is None else ids[row, 1:][kept].astype(np.int64),
            None if advantages is None or advantages.shape != mask.shape else advantages[row][kept].astype(np.float64),
            {**given, "tokens": int(kept.sum())},
            (step if isinstance(step, int) else None, None),
        )
