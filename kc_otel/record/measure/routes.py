"""Agreement of two kernels' routers: which experts each layer of a mixture of experts sends a token to.

Where routes differ, other weights compute the token, and drift is no longer a matter of rounding: about one decision in
ten differs between a trainer and an engine (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers").
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["route_disagreement"]

_BLOCK: Final = 1 << 22
"""Comparisons of two experts' ids at a time."""


def route_disagreement(train: Any, inference: Any) -> NDArray[np.float64]:
    """Share of a token's experts that the other kernel did not choose, by token and layer.

    >>> route_disagreement([[[0, 3]], [[1, 2]]], [[[3, 0]], [[1, 5]]])
    array([[0. ],
           [0.5]])

    Args:
        train: Ids of the experts that the training kernel chose, integers [tokens, layers, k], in any order.
        inference: Those of the inference kernel, same shape. A negative id is a place where nothing was chosen.

    Returns:
        float64 [tokens, layers]; nan where either kernel chose nothing.

    Raises:
        ValueError: If they are not such arrays; one that says of each expert whether it was chosen is none.
    """
    ours, theirs = np.asarray(train), np.asarray(inference)
    for name, each in (("train", ours), ("inference", theirs)):
        if each.dtype.kind not in "iu" or each.ndim != 3 or each.shape != ours.shape or not each.shape[2]:
            raise ValueError(
                f"{name}: {each.dtype} {each.shape} are no experts' ids [tokens, layers, k]; train has {ours.shape}"
            )
    tokens, layers, k = ours.shape
    found = np.empty((tokens, layers))
    step = max(_BLOCK // max(layers * k * k, 1), 1)
    for start in range(0, tokens, step):
        a, b = ours[start : start + step], theirs[start : start + step]
        for name, each in (("train", a), ("inference", b)):
            ordered = np.sort(each, axis=-1)
            if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
                raise ValueError(f"{name}: names an expert twice for one token; give the ids of the k that were chosen")
        agreed = (a[..., :, None] == b[..., None, :]).any(-1).mean(-1)
        nothing = (a.astype(np.int64) < 0).any(-1) | (b.astype(np.int64) < 0).any(-1)
        found[start : start + step] = np.where(nothing, np.nan, 1.0 - agreed)
    return found
