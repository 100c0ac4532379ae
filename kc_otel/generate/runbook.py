"""What to do when an alert fires, made from the contract: for whoever is woken and never saw it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import AlertStep

__all__ = ["FIRST_STEPS", "runbook"]

FIRST_STEPS: Final = {
    "fail": (
        "Look at the clause on the Slice dashboard: is the whole band above the limit on every slice, or on one?",
        "Look at the marks: did a kernel version or a weight sync come shortly before? If so, roll it back.",
        "Check invalid input and weight lag first: with mismatched sampling or stale weights every drift is theirs.",
        "Open the worst examples on the Slice dashboard: which tokens, at which position, of which requests?",
    ),
    "no-data": (
        "Nobody reports, so nothing is known: this is no all-clear. Is the traffic itself gone?",
        "Look at the Health dashboard: do the evaluator's points still arrive, do recorders drop or fail to export?",
        "Is a kernel version being rolled out, so that the old pair falls silent and the new one has yet to report?",
    ),
    "inconclusive": (
        "The samples do not decide it: the limit lies inside the confidence interval. Nothing is proven either way.",
        "Wait for more samples, or raise observability.sampling. What stays close to its limit stays undecided.",
    ),
    "invalid-input": (
        "Sequences cannot be compared, and are not measured. Look at the reason on the Health dashboard.",
        "Token ids differ or are shifted: the sides tokenise or align differently. Not finite: a kernel overflows.",
        "Repair the comparison before reading any drift.",
    ),
}
"""What to do first, by what a step of the policy waits for."""
_DONE: Final = {
    "notify": "people are told",
    "sample-more": "more batches are measured, so that the verdict firms up",
    "locate": "machines that follow run both kernels to name the operator; the answer stands on the incident",
    "hold-promotion": "promotions of this kernel version wait",
    "quarantine-rollouts": "roll-outs of the slice are kept out of training",
    "resync-weights": "the inference kernel is asked to take the trainer's weights again",
    "halt": "training is halted until a person resumes it",
    "route": "the slice is served by the training kernel until a person resumes it (`kc-otel resume`)",
    "webhook": "a webhook was sent",
}


def runbook(alert: AlertStep) -> str:
    """Numbered steps for the person who is told that a alert fires."""
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(_sentences(alert), start=1))


def _sentences(alert: AlertStep) -> Iterator[str]:
    done = "; ".join(_DONE[kind] for kind in dict.fromkeys(action.kind for action in alert.step.do))
    yield f"Done already by step {alert.number}: {done}."
    yield from FIRST_STEPS[alert.step.on]
    if alert.step.clear_for:
        yield f"It resolves by itself once the verdict has been gone for {format_duration(alert.step.clear_for)}."
    if alert.contract.metadata.runbook:
        yield f"The owner's own runbook: {alert.contract.metadata.runbook}"
    yield f"Owner: {alert.contract.metadata.owner}."
