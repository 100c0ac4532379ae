"""A pickled `DataProto` of ROLL that holds both kernels' log-probabilities.

Source: alibaba/ROLL 0.3.0 at 8eb27cc2dc34, roll/distributed/scheduler/protocol.py (`DataProto.__getstate__`: a
`torch.save`d TensorDict in a BytesIO, other columns, remote ones, what is said of the batch),
roll/pipeline/rlvr/rlvr_pipeline.py and agentic/agentic_pipeline.py: `old_log_probs` are log P at the start of the step,
and zeros where `enable_old_logprobs_recompute` is off; `infer_logprobs` are log Q, both [sequences, tokens - 1] with
entry t of token t + 1, under `response_mask` [sequences, tokens]. The correction of train_infer_corrections.py takes
tokens out of that mask because the sides differ there; `origin_response_mask` is from before, as raw rewards are in
`scores` or `episode_scores` once `response_level_rewards` are normalised. `traj_group_id` names what an environment's
rollouts share. ROLL's own dumps (`rollout_mock` with mode `dump`) are from before the trainer has scored anything:
pickle the batch after `old_log_probs`. Its text dumps (`rollout_dump_dir`) have no log-probabilities.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Refusals, batch_rows, needed, plain
from kc_otel.recordings.importers.safe_pickle import arrays, names_in, torch_load, unpickled
from kc_otel.recordings.recording import RecordingError

_SIDES: Final = ("old_log_probs", "infer_logprobs")


def looks_like(path: Path) -> bool:
    """Return True if a pickle is ROLL's."""
    return names_in(path, b"roll.distributed.scheduler.protocol", b"DataProto")


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file; errors as `detect.read_file`."""
    state = getattr(unpickled(path, path.read_bytes(), "roll"), "state", None)
    if not (isinstance(state, tuple) and len(state) == 4 and isinstance(state[0], io.BytesIO)):
        raise RecordingError(f"{path}: holds no DataProto of ROLL; pickle the batch itself")
    batch = arrays(torch_load(path, state[0].getvalue()))
    hint = (
        "rollout_mock dumps before the trainer has scored: pickle the batch after old_log_probs, of an engine that "
        "returns log-probabilities"
    )
    train, inference, response = needed(path, batch, (*_SIDES, "response_mask"), hint)
    if not train.any():
        raise RecordingError(
            f"{path}: old_log_probs are all 0: ROLL computes none; set `enable_old_logprobs_recompute: true`"
        )
    mask = batch.get("origin_response_mask", response)[:, 1:]
    others, meta = dict(state[1] or {}), dict(state[3] or {})
    step = meta.get("global_step") if isinstance(meta.get("global_step"), int) else None
    ids = batch.get("input_ids")
    raw = () if "origin_response_mask" in batch else ("response_level_rewards",)
    given_scores = [batch.get("scores"), others.get("episode_scores"), *(batch.get(name) for name in raw)]
    scores = next((values for values in given_scores if values is not None and values.ndim == 1), None)

    def about(row: int) -> tuple[dict[str, Scalar], tuple[int | None, None]]:
        given = plain({name: values[row] for name, values in others.items() if len(values) == train.shape[0]})
        if scores is not None:
            given["reward"] = float(scores[row])
        if "traj_group_id" in given:
            given["group"] = given["traj_group_id"]
        return given, (step, None)

    return batch_rows(
        path,
        refusals,
        dict(zip(_SIDES, (train, inference), strict=True)),
        {"response_mask": mask},
        about,
        token_ids=None if ids is None else ids[:, 1:],
        advantages=batch.get("advantages"),
        prompt_ids=None
        if ids is None
        else [row[: int(kept.argmax()) + 1] for row, kept in zip(ids, mask, strict=True)],
    )
