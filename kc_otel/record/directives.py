"""Directives of the evaluator to a training loop, obeyed in one place: measure more, drop rollouts, sync, stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from kc_otel.record.rollout_quarantine import quarantine
from kc_otel.record.sequence_attributes import Attributes

if TYPE_CHECKING:
    from kc_otel.record.recorder import Recorder

_log: Final = logging.getLogger("kc_otel")


class Directives(Protocol):
    """Source of directives; `kc_otel.client.router.Router` is one. No method may block."""

    def sampling(self, contract: str, default: float) -> float:
        """Share of comparisons to measure."""

    def quarantined(self, contract: str) -> Mapping[str, str]:
        """Slices whose rollouts should not be trained on, each with the reason."""

    def resync(self, contract: str) -> str | None:
        """Return the reason to sync the trainer's weights to the inference kernel; None if there is none."""

    def halted(self, contract: str) -> str | None:
        """Return the reason to stop training; None if there is none."""


class GuidedLoop:
    """A training loop that does what the contract's policy asks for; `Recorder.follow` makes it, with its arguments.

    The weights are sent again after `pause` steps at the earliest: the verdict is about a window, and fires for a while
    after they have arrived.
    """

    def __init__(
        self, recorder: Recorder, directives: Directives, send_weights: Callable[[], object] | None, pause: int
    ) -> None:
        if pause < 1:
            raise ValueError(f"pause: {pause!r} is not 1 or more")
        self._recorder = recorder
        self._directives = directives
        self._send_weights = send_weights
        self._pause = pause
        self._waiting = 0
        self._deaf = False
        self.reason: str | None = None
        """Reason to end the loop; None while there is none."""
        self.sent = 0
        """Times that the weights were sent again."""

    def go_on(self) -> bool:
        """Call it before each step: sends weights where that is asked for, and is False from a `halt` on.

        Never raises: a `send_weights` that fails is logged, and tried again after `pause` steps.
        """
        name = self._recorder.contract.name
        self._sync(self._directives.resync(name))
        if self.reason is None and (reason := self._directives.halted(name)) is not None:
            self.reason = reason
            _log.error("training stops: %s", reason)
        return self.reason is None

    def compare(
        self,
        train_logprobs: Any,
        inference_logprobs: Any,
        *,
        mask: Any = None,
        attributes: Attributes = None,
        **more: Any,
    ) -> Any:
        """Compare as `Recorder.compare` does, whose arguments these are, and say which tokens to train on.

        Returns:
            `mask` as it is while nothing is in quarantine. Else the same without the sequences of the slices in
            quarantine that break the contract by themselves, or fail an input check; counted in `kc.quarantine.*`.
            Arrays that cannot be looked at row by row are kept whole, and counted as dropped.
        """
        self._recorder.compare(train_logprobs, inference_logprobs, mask=mask, attributes=attributes, **more)
        contract = self._recorder.contract
        slices = self._directives.quarantined(contract.name)
        if not slices:
            return mask
        try:
            found = quarantine(
                train_logprobs,
                inference_logprobs,
                contract,
                mask=mask,
                attributes=attributes,
                slices=slices,
                kept=more.get("kept"),
            )
        except Exception as error:  # noqa: BLE001 - nothing is raised into the loop
            self._recorder.drop("quarantine-failed", error)
            return mask
        self._recorder.quarantined(found)
        return found.mask

    def _sync(self, reason: str | None) -> None:
        if reason is None:
            self._waiting = 0
            return
        if self._send_weights is None:
            if not self._deaf:
                _log.warning("weights should be sent again, and follow was given no send_weights: %s", reason)
            self._deaf = True
            return
        self._waiting -= 1
        if self._waiting >= 0:
            return
        self._waiting = self._pause - 1
        try:
            self._send_weights()
        except Exception:  # noqa: BLE001 - the user's function; training must not fail because of it
            _log.exception("weights were to be sent again and were not: %s", reason)
            return
        self.sent += 1
        _log.warning("weights sent again: %s", reason)
