"""The table of `llama-perplexity --kl-divergence`, from full logits.

Source: ggml-org/llama.cpp, tools/perplexity/perplexity.cpp at 050fc7f32de1 (`kl_divergence`, `log_softmax`). Its "base"
is the model whose logits were saved, P in our notation: the training kernel. Its "Q" is the model under test, our Q:
the inference kernel. Its KLD is therefore KL(P||Q), and Δp = Q(y) - P(y), in percent of probability.

llama.cpp keeps the base's log-probabilities in 16 bits, cut 16 nats below the largest logit, and leaves out tokens
below -16 nats. Both are done here too, so that a model compared with itself shows the small KLD that llama.cpp prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FEWEST", "Printed", "table"]

FEWEST: Final = 100
"""Tokens below which llama.cpp prints no table."""

Floats = NDArray[np.float64]

_CUT: Final = 16.0
_LEVELS: Final = 65535
_BLOCK: Final = 1 << 20
_KLD_RANKS: Final = (0.999, 0.990, 0.950, 0.900, None, 0.100, 0.050, 0.010, 0.001)
_DP_RANKS: Final = (0.999, 0.990, 0.950, 0.900, 0.750, None, 0.250, 0.100, 0.050, 0.010, 0.001)


class Printed(NamedTuple):
    """A number of the table and the standard error behind its ±; None where llama.cpp prints none."""

    value: float
    error: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """What is kept of each row: the token's negative log-likelihoods, KLD, Δp, whether the most likely token agrees."""

    nll: Floats
    nll_base: Floats
    kld: Floats
    p_diff: Floats
    same_top: NDArray[np.bool_]


def table(
    train_logits: ArrayLike, inference_logits: ArrayLike, token_ids: ArrayLike, *, sixteen_bits: bool = True
) -> dict[str, Printed]:
    """Perplexity, KL divergence and token probability statistics.

    Args:
        train_logits: Logits of the base model, the training kernel, [N, V].
        inference_logits: Logits of the model under test, the inference kernel, [N, V].
        token_ids: The token that follows in the text, [N].
        sixteen_bits: Keep the base as llama.cpp's file does. Without, the only difference from exact KL(P||Q) is the
            cut at -16 nats.

    Returns:
        By llama.cpp's label, in its order. Cor, Δp and Same top p are in percent, as printed. Standard errors take
        tokens as independent; llama.cpp's are 0 for means of ten tokens and fewer. It prints the table from `FEWEST`
        tokens on.

    Raises:
        ValueError: If the shapes do not fit, there is no row, a logit is not finite or a token is not in 0..V-1.
    """
    return _table(_tokens(*_checked(train_logits, inference_logits, token_ids), sixteen_bits=sixteen_bits))


def _checked(
    train_logits: ArrayLike, inference_logits: ArrayLike, token_ids: ArrayLike
) -> tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.intp]]:
    base, other, tokens = np.asarray(train_logits), np.asarray(inference_logits), np.asarray(token_ids)
    if base.ndim != 2 or not base.size:
        msg = f"train_logits: shape {base.shape} is not [N, V] with at least one row"
        raise ValueError(msg)
    if other.shape != base.shape:
        msg = f"inference_logits: shape {other.shape} is not train_logits' {base.shape}"
        raise ValueError(msg)
    if tokens.shape != base.shape[:1] or not np.issubdtype(tokens.dtype, np.integer):
        msg = f"token_ids: {tokens.dtype} {tokens.shape} are not {base.shape[0]} whole numbers, one per row of logits"
        raise ValueError(msg)
    if tokens.min() < 0 or tokens.max() >= base.shape[1]:
        msg = f"token_ids: {tokens.min()}..{tokens.max()} is not within the vocabulary, 0..{base.shape[1] - 1}"
        raise ValueError(msg)
    for name, logits in (("train_logits", base), ("inference_logits", other)):
        if not np.isfinite(logits).all():
            row = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
            msg = f"{name}: row {row} has a logit that is not finite; compare logits before top-k and top-p"
            raise ValueError(msg)
    return base, other, tokens.astype(np.intp)


def _tokens(
    base: NDArray[np.floating], other: NDArray[np.floating], tokens: NDArray[np.intp], *, sixteen_bits: bool
) -> _Tokens:
    rows, vocab = base.shape
    step = max(1, _BLOCK // vocab)
    nll, nll_base, kld, p_diff = np.empty((4, rows))
    same_top = np.empty(rows, dtype=np.bool_)
    for first in range(0, rows, step):
        here = slice(first, min(first + step, rows))
        chosen = (np.arange(here.stop - first), tokens[here])
        log_q = _log_softmax(other[here].astype(np.float64))
        log_p = _log_softmax(base[here].astype(np.float64))
        if sixteen_bits:
            log_p = _stored(log_p)
        p = np.where(log_p > -_CUT, np.exp(log_p), 0.0)
        nll[here], nll_base[here] = -log_q[chosen], -log_p[chosen]
        kld[here] = (p * (log_p - log_q)).sum(axis=1)
        p_diff[here] = np.exp(log_q[chosen]) - np.exp(log_p[chosen])
        same_top[here] = log_q.argmax(axis=1) == log_p.argmax(axis=1)
    return _Tokens(nll, nll_base, kld, p_diff, same_top)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalised: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalised


def _stored(log_p: Floats) -> Floats:
    """Log-probabilities as llama.cpp reads them back: 65536 levels from the smallest one (or max - 16) to the max."""
    top = log_p.max(axis=1, keepdims=True)
    bottom = np.maximum(log_p.min(axis=1, keepdims=True), top - _CUT)
    scale = (top - bottom) / _LEVELS
    codes = np.rint(np.maximum(log_p - bottom, 0.0) / np.where(scale > 0.0, scale, 1.0))
    stored: Floats = scale * codes + bottom
    return stored


def _table(of: _Tokens) -> dict[str, Printed]:
    n = of.nll.size
    nll, nll_base = _mean(of.nll), _mean(of.nll_base)
    covariance = ((of.nll * of.nll_base).mean() - of.nll.mean() * of.nll_base.mean()) / (n - 1) if n >= 10 else 0.0
    ppl, ppl_base = _exp(nll), _exp(nll_base)
    errors = _error(nll) * _error(nll_base)
    log_ratio = Printed(nll.value - nll_base.value, _spread(_error(nll), _error(nll_base), covariance))
    difference = _spread(_error(ppl), _error(ppl_base), ppl.value * ppl_base.value * covariance)
    square = _mean(of.p_diff**2)
    rms = np.sqrt(square.value)
    same = of.same_top.mean()
    return {
        "Mean PPL(Q)": ppl,
        "Mean PPL(base)": ppl_base,
        "Cor(ln(PPL(Q)), ln(PPL(base)))": Printed(100.0 * covariance / errors if errors > 0.0 else np.nan),
        "Mean ln(PPL(Q)/PPL(base))": log_ratio,
        "Mean PPL(Q)/PPL(base)": _exp(log_ratio),
        "Mean PPL(Q)-PPL(base)": Printed(ppl.value - ppl_base.value, difference),
        "Mean KLD": _mean(of.kld),
        **_distribution("KLD", of.kld, _KLD_RANKS),
        "Mean Δp": Printed(*(100.0 * number for number in (of.p_diff.mean(), _error(_mean(of.p_diff))))),
        **_distribution("Δp", 100.0 * of.p_diff, _DP_RANKS),
        "RMS Δp": Printed(100.0 * rms, 50.0 / rms * _error(square) if rms > 0.0 else 0.0),
        "Same top p": Printed(100.0 * same, 100.0 * np.sqrt(same * (1.0 - same) / (n - 1)) if n > 1 else np.nan),
    }


def _mean(values: Floats) -> Printed:
    """Mean and its standard error sqrt((mean of squares - square of mean) / (n - 1)); 0 for ten values and fewer."""
    variance = (values**2).mean() - values.mean() ** 2
    few = values.size <= 10 or variance <= 0.0
    return Printed(float(values.mean()), 0.0 if few else float(np.sqrt(variance / (values.size - 1))))


def _error(of: Printed) -> float:
    return of.error or 0.0


def _exp(of: Printed) -> Printed:
    """The exponential of a number, its error to first order."""
    value = float(np.exp(of.value))
    return Printed(value, value * _error(of))


def _spread(left: float, right: float, covariance: float) -> float:
    """Standard error of a difference. Rounding can make the variance of nearly equal numbers negative: then 0."""
    return float(np.sqrt(max(left**2 + right**2 - 2.0 * covariance, 0.0)))


def _distribution(name: str, values: Floats, ranks: tuple[float | None, ...]) -> dict[str, Printed]:
    ordered = np.sort(values)
    found = {f"Maximum {name}": Printed(float(ordered[-1]))}
    for rank in ranks:
        label = "Median" if rank is None else f"{100.0 * rank:.1f}%"
        found[f"{label} {name}"] = Printed(float(np.median(ordered)) if rank is None else _percentile(ordered, rank))
    return found | {f"Minimum {name}": Printed(float(ordered[0]))}


def _percentile(ordered: Floats, rank: float) -> float:
    """Linear interpolation between neighbours at rank * (n - 1), a position that llama.cpp computes in float32."""
    position = np.float32(rank) * np.float32(ordered.size - 1)
    place = int(position)
    share = float(position - np.float32(place))
    return float((1.0 - share) * ordered[place] + share * ordered[min(place + 1, ordered.size - 1)])
