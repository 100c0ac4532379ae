"""Why a sequence is not measured: one table of names, what each means, and what to do about it.

`kc-otel checks` prints it, log lines quote it, and it is where a new reason gets its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

__all__ = ["REASONS", "Explained", "InvalidReason", "remedy"]


class InvalidReason(IntEnum):
    """What the checks of `measure.checks` find; 0 when nothing. The metric's attribute is the name in lower case."""

    VALID = 0
    SHAPE_MISMATCH = 1
    """The two sides, the mask or the token ids differ in shape; the whole batch."""
    PROCESSING_MISMATCH = 2
    """The caller declared different temperatures or sampling processing for the two sides; the whole batch."""
    TOKEN_MISMATCH = 3
    """The two sides scored different tokens."""
    NAN_LOGPROB = 4
    """A log-probability is NaN."""
    POSITIVE_LOGPROB = 5
    """A log-probability is above 0 by more than rounding explains: logits or probabilities were passed."""
    IMPOSSIBLE_TOKEN = 6
    """The inference kernel gives probability 0 to a token that it sampled."""
    ZERO_FILLED = 7
    """One side is exactly 0 throughout, which is what a buffer that nobody wrote to looks like."""
    ONE_TOKEN_SHIFT = 8
    """One side is a token ahead of the other."""
    NAN_ADVANTAGE = 9
    """An advantage is not a finite number."""
    NAN_LOGITS = 10
    """A row of logits holds NaN or +inf, or nothing but -inf."""
    PADDING_COUNTED = 11
    """A sequence ends in a filler that the mask does not exclude."""
    TEMPERATURE_MISMATCH = 12
    """One side's log-probabilities are the other's at another temperature."""
    TRUNCATED_SAMPLING = 13
    """One side leaves out tokens that the other keeps (top-p, top-k, min-p), and says nothing of it."""
    PROMPT_MISMATCH = 14
    """The two sides saw different prompts."""
    NO_TOKENS = 15
    """A mask, or an empty sequence, leaves no token."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A reason in words.

    Attributes:
        meaning: What was found.
        remedy: What to do about it.
    """

    meaning: str
    remedy: str


REASONS: Final[Mapping[str, Explained]] = MappingProxyType(
    {
        "shape_mismatch": Explained(
            "The two sides, the mask or the token ids have different shapes; nothing of the batch is measured.",
            "Hand over one log-probability per sampled token on both sides, without the prompt.",
        ),
        "processing_mismatch": Explained(
            "The two sides were declared with different temperature, top-p or other sampling processing.",
            "Apply the same processing to the training logits before their log-softmax, or compare both without any.",
        ),
        "token_mismatch": Explained(
            "The training side scored other token ids than the inference side sampled.",
            "Score the sampled ids; decoding to text and encoding again does not give the same ids back.",
        ),
        "prompt_mismatch": Explained(
            "The two sides saw different prompt ids, so that they are not the same distribution.",
            "Give the training side the prompt ids that the engine used (vLLM: return_token_ids), not the text.",
        ),
        "nan_logprob": Explained(
            "A log-probability that counts is NaN.",
            "Mask tokens without one; otherwise look for an overflow in that kernel.",
        ),
        "positive_logprob": Explained(
            "A log-probability is above 0.",
            "Pass log-probabilities in nats: logits need a log-softmax, probabilities a logarithm. With `kept=`, the "
            "mass is above 1, or smaller than the token's own: the token is not among those that were kept.",
        ),
        "impossible_token": Explained(
            "The inference kernel gives probability 0 to a token that it sampled.",
            "Record the log-probabilities of the distribution that was sampled from, before a mask is applied again.",
        ),
        "zero_filled": Explained(
            "One side is exactly 0 throughout.",
            "The buffer was never written: turn log-probs on in the engine, or wait for the forward pass.",
        ),
        "one_token_shift": Explained(
            "One side is a token ahead of the other.",
            "logits[t] predict token t+1: align both sides to the token that they score.",
        ),
        "padding_counted": Explained(
            "A sequence ends in a filler, one and the same number, that the mask does not exclude.",
            "Pass the completion mask (or the lengths); padding is no token of the policy.",
        ),
        "temperature_mismatch": Explained(
            "One side is the other at another temperature, or in another base: log P is a multiple of log Q, nearly "
            "without scatter.",
            "Divide the training logits by the sampling temperature, and let vLLM report logprobs_mode="
            "processed_logprobs; a factor of 1.44 is the base 2, where both sides take nats; when all of this is "
            "right, one kernel scales its logits.",
        ),
        "truncated_sampling": Explained(
            "One side is renormalised over fewer tokens: every token is shifted the same way, by less than top-p, "
            "top-k or min-p can.",
            "Give the mass that each kernel has on the kept tokens (`kept=` of compare), sample with top_p=1 and top_k "
            "off, or apply the same truncation on the training side and declare it. "
            "Weights trained on this very sequence since look alike: take the log-probs from before the update.",
        ),
        "nan_advantage": Explained(
            "An advantage is not a finite number.",
            "Look at the rewards of its group; a group with equal rewards divided by its deviation gives NaN.",
        ),
        "reward_out_of_range": Explained(
            "A reward is outside of the contract's assumptions.reward_range; its sequence is measured, its reward "
            "counts as not known.",
            "Write the smallest and the largest reward that there can be into the contract.",
        ),
        "nan_logits": Explained(
            "A row of logits holds NaN or +inf, or nothing but -inf.",
            "Look for an overflow in that kernel; compare logits before they are masked.",
        ),
        "operator_not_finite": Explained(
            "Rows of an operator's output hold NaN or infinity on one side.",
            "Look for an overflow in that kernel; rows that both sides mask alike are no fault.",
        ),
        "raw_logprobs": Explained(
            "A request was sampled with temperature or truncation, and its log-probabilities are from before it.",
            "Start vLLM with --logprobs-mode processed_logprobs.",
        ),
        "greedy": Explained(
            "A request was decoded greedily: nothing was sampled, so that no average over its tokens estimates drift.",
            "Sample with a temperature above 0, or compare logits.",
        ),
        "unsupported_processing": Explained(
            "A request used processing that cannot be applied to the training kernel, such as penalties.",
            "Sample the requests that are compared without it.",
        ),
        "wrong_weights": Explained(
            "A request was sampled with weights of another name than the training kernel has.",
            "Score it with the checkpoint that served; name weights by optimizer step to have a lag measured instead.",
        ),
        "no_tokens": Explained(
            "A sequence has no sampled tokens, or a mask leaves none.",
            "Nothing to do for single ones; if all are so, the mask is upside down.",
        ),
        "no_logprobs": Explained(
            "A record has tokens or text but not both kernels' log-probabilities.",
            "Turn them on where the records are written: verl rollout.calculate_log_probs=True, vLLM logprobs=0.",
        ),
        "scoring_failed": Explained(
            "The score function failed on a request that can be scored by nobody else.",
            "The first failure is logged with its exception.",
        ),
    }
)
"""Value of the attribute `kc.reason` on `kc.input.invalid` -> what it means and what to do."""


def remedy(reason: str) -> str:
    """Meaning and remedy of a reason, in one line for a log; general words for one that has none here."""
    known = REASONS.get(reason)
    if known is None:
        return "sequences that fail an input check are counted and not measured"
    return f"{known.meaning} {known.remedy}"
