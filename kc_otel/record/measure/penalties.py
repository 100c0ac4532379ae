"""Penalties on tokens that came before, which one side applies and the other does not.

A presence or frequency penalty lowers the logits of tokens that the sequence already has, and a repetition penalty
those of the prompt as well. With d > 0 what it takes from each such token, on the inference side alone,

    l(y) = d(y) [y came before] + log E_P[exp(-d)],

so that tokens that came before have a positive l, and all the others, of which none may be in the prompt, a negative
one, each of at most d. No other fault and no drift knows which tokens came before: honest drift has both signs among
both, a truncation one sign for all, and a temperature that of how sure a token is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.sampled import saturated

DRIFT: Final = 0.03
"""Mean |l| from which it is looked for."""
LOOK: Final = 65_536
"""Tokens of a batch that are looked at: a penalty is set for all of its requests."""
_ONE_SIDED: Final = 0.88
"""Share of sum |l| of one sign, of tokens that came before. Simulated with words of Zipf's law and the noise of
bfloat16: 0.90 to 1 with presence and frequency of 0.1 to 1 and repetition of 1.05 to 1.3; of drift of the size of fp8
and of 4 bits 0.67 at most, of temperatures from 0.8 to 1.3 at most 0.84."""
_SHARE_GAP: Final = 0.45
"""By how much that share is another one among the other tokens: 0.6 to 1 with a penalty, 0.02 with drift or top-p, 0.43
with a temperature."""
_EFFECTIVE_TOKENS: Final = 48.0
"""Tokens that sum |l| is made of, in effect, of each of the two kinds."""


def penalised(
    train: NDArray[np.floating],
    inference: NDArray[np.floating],
    token_ids: NDArray[np.integer],
    lengths: NDArray[np.integer],
) -> str:
    """Return the reason where one side penalises earlier tokens; empty where neither does.

    Args:
        train: Log P of its tokens, row after row, [tokens].
        inference: Log Q of them.
        token_ids: Which tokens they are.
        lengths: Tokens of each row, [rows].
    """
    log_w = saturated(train.astype(np.float64) - inference)
    if not log_w.size or not float(np.abs(log_w).mean()) > DRIFT:
        return ""
    ids, row = token_ids.astype(np.int64), np.repeat(np.arange(lengths.size), lengths)
    _, first = np.unique(row * (int(ids.max()) + 1) + ids, return_index=True)
    before = np.ones(ids.size, dtype=np.bool_)
    before[first] = False
    shares = []
    for part in (log_w[before], log_w[~before]):
        size = float(np.abs(part).sum())
        if not size or size * size < _EFFECTIVE_TOKENS * float(part @ part):
            return ""
        shares.append(float(np.maximum(part, 0.0).sum()) / size)
    on_inference = shares[0] > 0.5
    again, new = shares if on_inference else [1.0 - share for share in shares]
    if again < _ONE_SIDED or again - new < _SHARE_GAP:
        return ""
    name = "inference" if on_inference else "training"
    return (
        f"the {name} side gives less to tokens that came before in their sequence: {again:.0%} of sum |l| has that "
        f"sign among them, {new:.0%} among the others"
    )
