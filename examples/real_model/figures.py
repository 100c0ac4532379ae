"""What the measurements of a pair say: every figure of the page, as numbers that JSON can hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from examples.real_model.prompts import SLICES, prompts
from examples.rl_bias.gradient_bounds import clip_budget_share
from examples.rl_bias.sequence_bounds import tv_sequence_uniform
from examples.rl_bias.token_bounds import token_tv, tv_from_kl
from kc_otel.offline.draft import Draft, write
from kc_otel.record.measure.logits import LOGITS
from kc_otel.recordings.recording_files import load_recording
from kc_otel.stats import Binned, capped_mean_interval, estimated_reward_drift, reward_drift_interval
from kc_otel.stats.rewards import reward_sides

ALL: Final = "all"
HORIZONS: Final = (32, 64, 128, 256, 512)
BUDGET: Final = 0.3
"""Of the mean reward: what `init --baseline` is asked for limits with."""
ACCEPTED: Final = "vllm-bf16"
"""The pair whose limit all others are held against."""
CLIP: Final = 0.2
ALPHA: Final = 0.005
_LEAST_SHARE: Final = 0.05
"""Of answers that importance weights leave: below it they say nothing of the training kernel's rewards."""
_PLACES: Final = (0, 8, 16, 32, 64, 128, 256, 512)
_ENTROPIES: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 99.0)
_TV, _KL, _RANGE = (LOGITS.index(key) for key in ("tv_exact", "kl_inference_train", "logit_half_range"))

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Answers of S sequences with N tokens in all, one sequence after the other.

    Attributes:
        prompt: Number of each sequence's prompt [S].
        length: Its tokens [S].
        budget: Most tokens that it could have had [S].
        reward: Its reward [S].
        place: Of each token in its sequence [N].
        tokens: Token ids [N].
        train: log P of each token, nats [N].
        inference: log Q [N].
        entropy: Of Q, nats [N].
        drift: Quantities of LOGITS from full logits [N, 7].
    """

    prompt: NDArray[np.int64]
    length: NDArray[np.int64]
    budget: NDArray[np.int64]
    reward: Floats
    place: NDArray[np.int64]
    tokens: NDArray[np.int64]
    train: Floats
    inference: Floats
    entropy: Floats
    drift: Floats

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins [S]."""
        return np.cumsum(self.length) - self.length

    @property
    def slices(self) -> NDArray[np.str_]:
        """Slice of each sequence [S]."""
        return np.array([SLICES[number % len(SLICES)] for number in self.prompt])

    def only(self, chosen: NDArray[np.bool_]) -> Measured:
        """These sequences [S]."""
        tokens = np.repeat(chosen, self.length)
        return Measured(*(value[tokens if name in _OF_TOKENS else chosen] for name, value in vars(self).items()))

    def sums(self, values: Floats, horizon: int | None = None) -> Floats:
        """Sums over each sequence's tokens, or over its first so many [S]."""
        inside = values if horizon is None else np.where(self.place < horizon, values, 0.0)
        return np.add.reduceat(inside, self.starts)


_OF_TOKENS: Final = {"place", "tokens", "train", "inference", "entropy", "drift"}


def read(folder: Path, name: str) -> Measured | None:
    """What was measured of a pair so far; None for nothing."""
    asked, parts = prompts(), []
    for file in sorted((folder / name).glob("??.npz")):
        with np.load(file) as found:
            number, length = int(file.stem), found["length"].astype(np.int64)
            inside = np.arange(found["tokens"].shape[1]) < length[:, None]
            of_tokens = {
                key: found[key][inside].astype(np.float64) for key in ("train", "inference", "entropy", "drift")
            }
            parts.append(
                {
                    "prompt": np.full(length.size, number),
                    "length": length,
                    "budget": np.full(length.size, max(asked[number].tokens, inside.shape[1])),
                    "reward": found["reward"].astype(np.float64),
                    "place": np.nonzero(inside)[1],
                    "tokens": found["tokens"][inside].astype(np.int64),
                    **of_tokens,
                }
            )
    if not parts:
        return None
    return Measured(**{key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def figures(measured: Measured) -> dict[str, Any]:
    """By slice what drift is; over all traffic also by position, by entropy and by horizon."""
    slices = {ALL: measured}
    slices |= {name: measured.only(measured.slices == name) for name in SLICES if (measured.slices == name).any()}
    return {
        "prompts": int(np.unique(measured.prompt).size),
        "sequences": int(measured.prompt.size),
        "tokens": int(measured.place.size),
        "slices": {name: of_slice(part) for name, part in slices.items()},
        "chain": [chain(measured, horizon) for horizon in HORIZONS if (measured.budget >= horizon).any()],
        "position": binned(measured, measured.place, _PLACES),
        "entropy": binned(measured, measured.entropy, _ENTROPIES),
    }


def of_slice(measured: Measured) -> dict[str, Any]:
    """What a contract's clauses are about, estimates from sampled tokens beside the truth from full logits."""
    ratio = measured.train - measured.inference
    hidden = np.maximum(-np.expm1(ratio), 0.0)  # (1 - w)+
    sequence = measured.sums(hidden) / measured.length
    tv = by_prompt(sequence, measured.prompt)
    whole = measured.sums(ratio)
    return {
        "token_tv": float(tv.mean()),
        "token_tv_error": float(tv.std(ddof=1) / tv.size**0.5) if tv.size > 1 else None,
        "token_tv_exact": mean_by_prompt(measured, measured.drift[:, _TV]),
        "kl_exact": mean_by_prompt(measured, measured.drift[:, _KL]),
        "k3": mean_by_prompt(measured, np.expm1(ratio) - ratio),
        "mean_abs_l": mean_by_prompt(measured, np.abs(ratio)),
        "ess_sequence": effective_share(whole),
        "beyond_clip": mean_by_prompt(measured, (np.abs(np.expm1(ratio)) > CLIP).astype(float)),
        "clip_share": clip_budget_share(mean_by_prompt(measured, np.abs(ratio)), CLIP),
        "design_effect": design_effect(sequence, measured.prompt),
        "sequence_tv": float(by_prompt(np.maximum(-np.expm1(whole), 0.0), measured.prompt).mean()),
        "tokens": int(measured.place.size),
        "reward": rewards(measured, whole),
    }


def rewards(measured: Measured, whole: Floats) -> dict[str, Any]:
    """The drift of the mean reward E_P[r] - E_Q[r], by the prompts' baselines and in the worst case."""
    found: dict[str, Any] = {"mean": float(by_prompt(measured.reward, measured.prompt).mean())}
    sides = [by_prompt(side, measured.prompt) for side in reward_sides(whole, measured.reward, (0.0, 1.0))]
    bound = reward_drift_interval(*map(Binned.of_samples, sides), (0.0, 1.0), alpha_lower=ALPHA, alpha_upper=ALPHA)
    found["at_most"] = bound.upper
    if np.unique(measured.prompt).size > 1 and effective_share(whole) > _LEAST_SHARE:
        drift = estimated_reward_drift(whole, measured.reward, measured.prompt)
        found |= {"drift": drift.drift, "lower": drift.lower, "upper": drift.upper}
    return found


def chain(measured: Measured, horizon: int) -> dict[str, Any]:
    """The total variation of the first so many tokens, and every bound on it, over prompts that may take as many."""
    part = measured.only(measured.budget >= horizon)
    ratio = part.train - part.inference
    inside = part.place < horizon
    truth = by_prompt(np.maximum(-np.expm1(part.sums(ratio, horizon)), 0.0), part.prompt)

    def mean(values: Floats) -> float:
        return float(by_prompt(values, part.prompt).mean())

    kl = mean(part.sums(part.drift[:, _KL], horizon))
    worst = token_tv(half_range=float(part.drift[inside, _RANGE].max())).value
    return {
        "horizon": horizon,
        "prompts": int(np.unique(part.prompt).size),
        "sequences": int(part.prompt.size),
        "sequence_tv": float(truth.mean()),
        "standard_error": float(truth.std(ddof=1) / truth.size**0.5) if truth.size > 1 else None,
        "kl_over_steps": float(tv_from_kl(kl).value),
        "coupling": mean(-np.expm1(part.sums(np.minimum(ratio, 0.0), horizon))),
        "sum_of_token_tv": min(1.0, mean(part.sums(part.drift[:, _TV], horizon))),
        "worst_token_tv": tv_sequence_uniform(float(part.drift[inside, _TV].max()), horizon),
        "half_range": tv_sequence_uniform(worst, horizon),
    }


def binned(measured: Measured, of: NDArray[Any], edges: tuple[float, ...]) -> list[dict[str, Any]]:
    """Token TV and KL where a quantity of the tokens lies between two edges."""
    found = []
    for low, high in pairwise(edges):
        inside = (of >= low) & (of < high)
        if inside.any():
            drift = measured.drift[inside].mean(0)
            found.append(
                {"from": low, "to": high, "tokens": int(inside.sum()), "tv": float(drift[_TV]), "kl": float(drift[_KL])}
            )
    return found


def by_prompt(values: Floats, prompt: NDArray[np.int64]) -> Floats:
    """The mean of each prompt's sequences [prompts]."""
    _, of = np.unique(prompt, return_inverse=True)
    return np.asarray(np.bincount(of, values) / np.bincount(of))


def mean_by_prompt(measured: Measured, values: Floats) -> float:
    """The mean over prompts of the mean over rollouts of the mean over tokens."""
    return float(by_prompt(measured.sums(values) / measured.length, measured.prompt).mean())


def effective_share(ratio: Floats) -> float:
    """ESS / n of importance weights exp(ratio)."""
    weights = np.exp(ratio - ratio.max())
    return float(weights.sum() ** 2 / (weights.size * (weights**2).sum()))


def design_effect(values: Floats, prompt: NDArray[np.int64]) -> float | None:
    """How many sequences count as one, as rollouts share a prompt: 1 + (G - 1) intra-class correlation."""
    groups = [values[prompt == number] for number in np.unique(prompt)]
    size = len(groups[0])
    if len(groups) < 2 or size < 2 or any(len(group) != size for group in groups):
        return None
    within = float(np.mean([group.var(ddof=1) for group in groups]))
    between = size * float(np.var([group.mean() for group in groups], ddof=1))
    correlation = (between - within) / (between + (size - 1) * within) if between + within else 0.0
    return 1.0 + (size - 1) * max(correlation, 0.0)


def save_recording(measured: Measured, into: Path) -> None:
    """Both kernels' log-probabilities of what was sampled, as `kc-otel gate run` and `compare` read them."""
    np.savez_compressed(
        into,
        train_logprobs=measured.train.astype(np.float32),
        inference_logprobs=measured.inference.astype(np.float32),
        token_ids=measured.tokens.astype(np.uint16),
        lengths=measured.length.astype(np.int32),
        task=measured.slices,
        group=measured.prompt.astype(np.int16),
        reward=measured.reward.astype(np.float32),
    )


def together(folder: Path, pairs: Iterable[str]) -> dict[str, Any]:
    """The figures of every pair of which there is something, and the limits that `init --baseline` makes of it."""
    found = {name: measured for name in pairs if (measured := read(folder, name)) is not None}
    limits = {name: limits_of(measured) for name, measured in found.items()}
    return {
        name: figures(measured)
        | limits[name]
        | {
            key: dict(zip(("verdict", "prompts"), prompts_to_decide(measured, limits[which]["limit"]), strict=True))
            for key, which in (("at_own_limit", name), ("at_accepted_limit", ACCEPTED))
            if which in limits
        }
        for name, measured in found.items()
    }


def limits_of(measured: Measured) -> dict[str, Any]:
    """Limits on mean token TV, of all traffic and of slices that are worse, as `init --baseline` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        save_recording(measured, file := Path(folder) / "pair.npz")
        kernels, slices = ({"engine": "train"}, {"engine": "inference"}), {name: {"task": name} for name in SLICES}
        draft = Draft("study", "study", *kernels, reward_budget=BUDGET, horizon=max(HORIZONS), slices=slices)
        contract = write(draft, load_recording(file)).contract
    clause = next(clause for clause in contract.clauses if clause.id == "token-tv")
    return {"limit": clause.limit_for(ALL), "slice_limits": dict(clause.slices)}


def prompts_to_decide(
    measured: Measured, limit: float, *, draws: int = 20, most: int = 2_000
) -> tuple[str, int | None]:
    """The verdict on mean token TV, and the median number of prompts that a gate which stops early takes for it.

    Prompts are drawn again and again from those measured, since a gate takes more than the study has: what it says is
    how soon traffic like this is decided. The mean is of token TV cut at five limits, as contracts for gates have it.
    """
    hidden = np.maximum(-np.expm1(measured.train - measured.inference), 0.0)
    values = by_prompt(measured.sums(hidden) / measured.length, measured.prompt)
    chance = np.random.default_rng(0)
    taken, said = [], []
    for _ in range(draws):
        drawn = chance.choice(values, most)
        verdict, number = "INCONCLUSIVE", most
        for looked in (round(20 * 1.25**step) for step in range(21)):
            interval = capped_mean_interval(
                Binned.of_samples(drawn[:looked]), low=0.0, high=1.0, cap=5.0 * limit, alpha_lower=ALPHA,
                alpha_upper=ALPHA, cut=True, anytime=True,
            )  # fmt: skip
            if interval.upper <= limit or interval.lower > limit:
                verdict, number = ("PASS" if interval.upper <= limit else "FAIL"), looked
                break
        said.append(verdict)
        taken.append(number)
    verdict = max(set(said), key=said.count)
    return verdict, None if verdict == "INCONCLUSIVE" else int(np.median(taken))
