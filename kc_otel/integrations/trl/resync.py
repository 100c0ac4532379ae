"""Sending the trainer's weights to the inference kernel again, when the contract asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kc_otel.integrations.transformers import TrainerCallback, of_first_process

__all__ = ["ResyncWeights"]

_log: Final = logging.getLogger("kc_otel")


class ResyncWeights(TrainerCallback):  # type: ignore[misc]
    """Calls `sync` before the next step while a `resync-weights` step of the contract's policy fires.

    >>> router = Router("http://127.0.0.1:4320")                                               # doctest: +SKIP
    >>> sync = trainer.vllm_generation.sync_weights                                            # doctest: +SKIP
    >>> trainer.add_callback(ResyncWeights(lambda: router.resync("policy-7b"), lambda _: sync()))  # doctest: +SKIP

    The verdict is about a window, so it goes on firing for a while after the weights have arrived: they are sent again
    only if it still does `pause` steps later, or if it has stopped and starts anew. In a distributed run the first
    process decides for all and `sync` is called in each, as TRL's own synchronisation is.

    Args:
        asked: Why the weights should be sent; None where nobody asks. It must not block: the router answers from
            memory. Where it fails, training goes on.
        sync: Called with the model. Where it fails, that is logged, training goes on, and it is tried again after
            `pause` steps.
        pause: Steps between two calls while the same reason lasts.

    Raises:
        ValueError: If `pause` is not 1 or more.
    """

    def __init__(self, asked: Callable[[], str | None], sync: Callable[[Any], object], *, pause: int = 20) -> None:
        if pause < 1:
            raise ValueError(f"pause: {pause!r} is not 1 or more")
        self._asked = asked
        self._sync = sync
        self._pause = pause
        self._since: int | None = None
        self._failed = False
        self.reason: str | None = None
        """Why the weights were sent last; None while they were not."""
        self.steps: list[int] = []
        """Optimizer steps after which they were sent."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the hook's
        """Send the weights where it is asked for."""
        reason = self._ask() if state.is_world_process_zero else None
        if args.world_size > 1:
            reason = of_first_process(reason)
        if reason is None:
            self._since = None
            return
        if self._since is not None and state.global_step - self._since < self._pause:
            return
        self._since = state.global_step
        try:
            self._sync(kwargs.get("model"))
        except Exception:  # noqa: BLE001 - the user's function; training must not fail because of it
            _log.exception("step %d: weights were to be sent again and were not: %s", state.global_step, reason)
            return
        self.reason = reason
        self.steps.append(state.global_step)
        _log.warning("step %d: weights sent again: %s", state.global_step, reason)

    def _ask(self) -> str | None:
        try:
            return self._asked()
        except Exception:  # noqa: BLE001 - the user's function; training must not fail because of it
            if not self._failed:
                self._failed = True
                _log.exception("whether weights should be sent again cannot be told; training goes on")
            return None
