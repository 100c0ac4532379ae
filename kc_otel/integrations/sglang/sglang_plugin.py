"""Plugin of SGLang's group `sglang.srt.plugins`, called in each of its processes.

Source: sglang 0.5.23, sglang/srt/plugins/hook_registry.py: hooks are named after the function that they run before,
and applied when all plugins have been loaded. Three of the front end's are enough; schedulers never call them. Where
SGLang allows plugins by name (`SGLANG_PLUGINS`), `kc_otel` has to be among them.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

_log = logging.getLogger("kc_otel")
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKED: Final = {
    "sent": f"{_MANAGER}._send_one_request",
    "sent_together": f"{_MANAGER}._send_batch_request",
    "received": f"{_MANAGER}._handle_batch_output",
}
"""Functions before which each hook stands."""


def load() -> None:
    """Register the hooks if the environment names a contract; failures are logged, and SGLang starts."""
    try:
        from kc_otel.integrations.vllm.plugin import configured  # noqa: PLC0415 - nothing may be raised
        from kc_otel.integrations.vllm.settings import settings_of  # noqa: PLC0415 - nothing may be raised from here

        if not configured(os.environ):
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

        from kc_otel.integrations.sglang.sglang_capture import SglangCapture  # noqa: PLC0415

        capture = SglangCapture(lambda: settings_of(os.environ))
        for method, target in HOOKED.items():
            HookRegistry.register(target, _guarded(capture, method), HookType.BEFORE)
    except Exception as error:  # noqa: BLE001 - whatever it is, SGLang has to start
        _log.error("kc-otel: SGLang is not instrumented: %s", error)


def _guarded(capture: Any, method: str) -> Any:
    """A hook that looks and changes nothing of the call, whatever happens in it."""
    look = getattr(capture, method)

    def before(manager: Any, given: Any, *_: Any, **__: Any) -> None:
        try:
            look(manager, given)
        except Exception as error:  # noqa: BLE001 - the request goes on without being recorded
            capture.failed(error)

    return before
