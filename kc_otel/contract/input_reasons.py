"""Reasons why a sequence is not measured: one table of names, meanings and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class InvalidReason(IntEnum):
    """Findings of the checks in `measure.checks`; 0 for none. REASONS explains each under its name in lower case."""

    VALID = 0
    SHAPE_MISMATCH = 1
    PROCESSING_MISMATCH = 2
    TOKEN_MISMATCH = 3
    NAN_LOGPROB = 4
    POSITIVE_LOGPROB = 5
    IMPOSSIBLE_TOKEN = 6
    PLACEHOLDER = 7
    NOT_SAME_TOKENS = 8
    NAN_ADVANTAGE = 9
    NAN_LOGITS = 10
    ONE_VALUE = 11
    TEMPERATURE_MISMATCH = 12
    TRUNCATED_SAMPLING = 13
    PROMPT_MISMATCH = 14
    NO_TOKENS = 15
    NOT_SAMPLED = 16
    PENALISED_SAMPLING = 17
    NOT_LOGPROBS = 18


@dataclass(frozen=True, slots=True)
class Explained:
    """A reason in words: what was found, and what to do about it."""

    meaning: str
    remedy: str


REASONS: Final[Mapping[str, Explained]] = MappingProxyType(
    {
        "shape_mismatch": Explained(
            "The two sides, the mask or the token ids have different shapes; nothing of the batch is measured.",
            "Pass one log-probability per sampled token on both sides, without the prompt."),
        "processing_mismatch": Explained(
            "The two sides were declared with different temperature, top-p or other sampling processing.",
            "Apply the same processing to the training logits before their log-softmax, or compare both without any."),
        "token_mismatch": Explained(
            "The training side scored different token ids from those that the inference side sampled.",
            "Score the sampled ids; decoding to text and encoding again does not give the same ids back."),
        "prompt_mismatch": Explained(
            "The two sides saw different prompt ids, so their distributions are not comparable.",
            "Give the training side the prompt ids that the engine used (vLLM: return_token_ids), not the text."),
        "nan_logprob": Explained("An unmasked log-probability is NaN.",
            "Mask tokens without one; otherwise look for an overflow in that kernel."),
        "positive_logprob": Explained("A log-probability is above 0.",
            "A value up to 0.25 comes from rounding: a log-sum-exp in bfloat16 lies below its largest logit; compute "
            "the log-softmax in float32. Otherwise pass log-probabilities in nats: logits need a log-softmax, "
            "probabilities a logarithm. With `kept=`, the kept mass is above 1, or below the token's own probability: "
            "the token is not among those that were kept."),
        "impossible_token": Explained("The inference kernel gives probability 0 to a token that it sampled.",
            "Record the log-probabilities of the distribution that was sampled from, before any further mask is "
            "applied."),
        "placeholder": Explained(
            'Numbers of a sequence are constants that stand for "no number": exact zeros, a run of one value, a floor, '
            "or copies of the other side's.",
            "Apply every mask of the row, so that tokens that the policy did not sample (tool output, padding, tokens "
            "appended by hand) are left out; enable log-probabilities in the engine for the others. A sampler at a "
            "temperature near 0 gives exact zeros, too: sample at a higher one. Where every number is a copy, an "
            "engine lacks the declared number format, or a trainer passes the sampler's numbers as its own.",
        ),
        "one_value": Explained("One side has one value for a whole sequence.",
            "Pass a log-probability for each token: this is a mean or a sum over the sequence, repeated on its "
            "tokens."),
        "not_logprobs": Explained(
            "One side's numbers are not log-probabilities of single tokens as a kernel computes them.",
            "Take one log-softmax of the logits in float32 and pass each token's own number: not a sum or mean over "
            "tokens, not a softmax of probabilities, and not a log ratio that was clipped or masked by its size."),
        "not_same_tokens": Explained(
            "The two sides do not score the same tokens: along the sequence, log P and log Q are unrelated.",
            "logits[t] predict token t+1: align both sides to the token that they score. Look for an extra or missing "
            "token (BOS, end of turn), rows in another order, chunks of context parallelism joined in another order, "
            "and text that was encoded again."),
        "not_sampled": Explained(
            "The tokens were not sampled with the inference side's probabilities: otherwise the mean of P/Q would be "
            "1, and improbable tokens would be as frequent as those probabilities say.",
            "Check whether the sides are swapped; whether the log-probabilities are those of the sampled token, under "
            "its sampling parameters (vLLM: logprobs_mode=processed_logprobs; greedy tokens are not a sample), in nats "
            "and of single tokens, from a log-sum-exp over the whole vocabulary; and whether both sides have the same "
            "weights."),
        "temperature_mismatch": Explained(
            "One side is the other at another temperature, or to another base: log P is a multiple of log Q, with "
            "hardly any scatter.",
            "Divide the training logits by the sampling temperature, and let vLLM report "
            "logprobs_mode=processed_logprobs; a factor of 1.44 means base 2, but both sides need nats; a factor as "
            "large as a length means a mean over tokens; if all of this is right, one kernel scales its logits."),
        "truncated_sampling": Explained(
            "One side is renormalised over fewer tokens: all log ratios are shifted in the same direction, by an "
            "amount that top-p, top-k or min-p can cause.",
            "Give the mass that each kernel has on the kept tokens (`kept=` of compare), sample with top_p=1 and top_k "
            "off, or apply the same truncation on the training side and declare it. Weights that have already been "
            "trained on the sequence look the same: take the log-probabilities before the update."),
        "penalised_sampling": Explained(
            "One side has a presence, frequency or repetition penalty that the other lacks: it gives less probability "
            "to tokens that came earlier in their sequence, and more to all others.",
            "Turn penalties off for the requests that you want to compare; no score function can apply them."),
        "nan_advantage": Explained("An advantage is not a finite number.",
            "Check the rewards of its group: if they are all equal, dividing by their standard deviation gives NaN."),
        "reward_out_of_range": Explained(
            "A reward is outside the contract's assumptions.reward_range; its sequence is measured, and its reward "
            "counts as unknown.", "Set reward_range in the contract to the smallest and the largest possible reward."),
        "nan_logits": Explained("A row of logits holds NaN or +inf, or only -inf.",
            "Look for an overflow in that kernel; compare logits before they are masked."),
        "no_routes": Explained(
            "A layer has routes on one side only, or on neither (-1): its tokens are missing and do not count as "
            "agreement.",
            "Enable the return of routed experts where they are recorded, and pass the layers that have experts."),
        "unrelated_routes": Explained(
            "Routes differ exactly as often as those of unrelated tokens or layers would, 1 - k/E.",
            "Align both sides by token and layer. Look for extra prompt tokens, a dense layer that only one side "
            "counts, or expert ids numbered within one rank."),
        "operator_not_finite": Explained("Rows of an operator's output hold NaN, or infinity on one side.",
            "Look for an overflow in that kernel; rows that both sides mask in the same way are not a fault."),
        "raw_logprobs": Explained(
            "A request was sampled with temperature or truncation, which its log-probabilities do not include.",
            "Start vLLM with --logprobs-mode processed_logprobs."),
        "greedy": Explained(
            "A request was decoded greedily: nothing was sampled, so no average over its tokens estimates drift.",
            "Sample with a temperature above 0, or compare logits. Beside sampled requests it is no fault; a slice "
            "that has greedy ones alone has no data and holds promotions, so leave it out of the contract."),
        "unsupported_processing": Explained(
            "A request used processing that cannot be applied to the training kernel, such as penalties.",
            "Turn it off for the requests that you want to compare."),
        "wrong_weights": Explained(
            "A request was sampled with weights or a LoRA adapter whose name differs from the training kernel's.",
            "Score it with the checkpoint and the adapter that served it, or name weights by optimizer step, so that "
            "the lag is measured instead."),
        "no_tokens": Explained("A sequence has no sampled tokens, or a mask leaves none.",
            "Ignore single cases; if every sequence is affected, the mask is inverted."),
        "no_logprobs": Explained("A record has tokens or text but not both kernels' log-probabilities.",
            "Enable them where the records are written: verl rollout.calculate_log_probs=True, vLLM logprobs=0."),
        "split_prompt": Explained(
            "Rollouts of a prompt were appended to a file after the prompt had counted. Rollouts of one prompt are one "
            "observation, not several.",
            "Write all rollouts of a prompt at once, and give a prompt that is sampled again in a later step that step "
            "(`step` or `train_weights`)."),
        "rewritten_file": Explained(
            "A file has changed after it was imported and begins with the same sequence as before: nobody knows which "
            "of its sequences have counted.",
            "Append lines to a .jsonl file, or write further rollouts to further files."),
        "unreadable": Explained(
            "A file, or the last line of one, cannot be read as sequences; nothing else is known of it.",
            "Read what `import` says of the file. The last line of a trainer that was killed is cut off: remove it."),
        "scoring_failed": Explained("The score function failed on a request, even when that request was scored alone.",
            "Read the log, which has the exception of the first failure."),
    }
)  # fmt: skip
"""Value of the attribute `kc.reason` on `kc.input.invalid` -> what it means and what to do."""


ON_PURPOSE: Final = frozenset({"no_tokens", "greedy"})
"""Reasons of sequences that are kept from being measured on purpose, by a mask or by greedy decoding: while others are
valid they are no fault."""


def remedy(reason: str) -> str:
    """Meaning and remedy of a reason, in one line for a log; general words for one that has none here."""
    known = REASONS.get(reason)
    if known is None:
        return "sequences that fail an input check are counted and not measured"
    return f"{known.meaning} {known.remedy}"
