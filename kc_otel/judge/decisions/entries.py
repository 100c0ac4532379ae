"""What the decision table is made of: routes, directives, pins, canaries, and what people took back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Canary", "Directive", "DirectiveKind", "Pin", "Resumption", "Route"]


class DirectiveKind(StrEnum):
    """What a directive asks for."""

    SAMPLING = "sample-more"
    LOCATE = "locate"
    HOLD_PROMOTION = "hold-promotion"
    QUARANTINE_ROLLOUTS = "quarantine-rollouts"
    RESYNC_WEIGHTS = "resync-weights"
    HALT = "halt"


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """A slice is kept away from one version of the inference kernel.

    Attributes:
        contract: metadata.name.
        slice: Name of the slice; `all` for every request.
        avoid: Short fingerprint of the inference kernel version that is not used.
        train: Short fingerprint of the training kernel version that was healthy beside it.
        kernel: Kernel used instead.
        clause: Clause that broke.
        reason: One sentence.
        since: Unix time, seconds.
        until: Unix time at which the route ends by itself, seconds; None when a person has to end it.
    """

    contract: str
    slice: str
    avoid: str
    train: str
    kernel: str
    clause: str
    reason: str
    since: float
    until: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class Directive:
    """What a firing alert asks of recorders, promotion, training loops and machines that can locate.

    Attributes:
        contract: metadata.name.
        kind: sample-more, locate, hold-promotion, quarantine-rollouts, resync-weights or halt.
        slice: Slice that broke; it narrows quarantine-rollouts, the other kinds hold for the whole contract.
        reason: One sentence; never empty.
        since: Unix time, seconds.
        fingerprint: The alert that asked; the directive ends when it resolves.
    """

    contract: str
    kind: DirectiveKind
    slice: str
    reason: str
    since: float
    fingerprint: str


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A person decided which kernel serves a slice.

    Attributes:
        contract: metadata.name.
        slice: Name of the slice; `all` for every request.
        kernel: `train-kernel` or `inference-kernel`.
        by: Who.
        why: Their reason.
        at: Unix time, seconds.
        until: Unix time at which the pin ends by itself, seconds; None when a person has to end it.
    """

    contract: str
    slice: str
    kernel: str
    by: str
    why: str
    at: float
    until: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class Canary:
    """A version of the inference kernel serves a share of a slice's requests; the training kernel serves the others.

    Slices without a canary of the version are not limited. Where several cover a request the smallest weight counts.

    Attributes:
        contract: metadata.name.
        slice: Name of the slice; `all` for every request.
        version: Short fingerprint of the inference kernel version.
        weight: Share of requests that it serves, 0 to 1; 0 keeps it from live requests, as while it is in shadow.
        reason: One sentence.
        since: Unix time, seconds.
        until: Unix time after which the version serves nothing of the slice, seconds: a canary that nobody decided on
            is no promotion. It stays in the table until it is set anew or removed. None for no end.
    """

    contract: str
    slice: str
    version: str
    weight: float
    reason: str
    since: float
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """A person gave a slice back to the inference kernel.

    Attributes:
        contract: metadata.name.
        slice: Name of the slice; None for every slice.
        by: Who.
        why: Their reason.
        at: Unix time, seconds.
        versions: Inference kernel versions that are no longer avoided.
    """

    contract: str
    slice: str | None
    by: str
    why: str
    at: float
    versions: tuple[str, ...]
