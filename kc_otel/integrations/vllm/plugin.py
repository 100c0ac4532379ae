"""Plugin of vLLM's group `vllm.general_plugins`, called in each of its processes.

It may be called several times in a process, must not stop vLLM from starting, and does nothing unless enabled. It is
enabled by environment variables, which vLLM's processes inherit.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)


def load() -> None:
    """Instrument this process if the environment says so; failures are logged once, by the first process."""
    try:
        from kc_otel.integrations.vllm.worker_methods import (  # noqa: PLC0415 - nothing may be raised from here
            add_worker_method,
            configured,
        )

        # Also for a program that instruments itself, whose workers are other processes.
        add_worker_method()
        if not configured(os.environ):
            return
        from kc_otel.integrations.vllm.engine_log import EngineLog  # noqa: PLC0415

        EngineLog.attach()  # before anything can go wrong
        from kc_otel.integrations.vllm.instrumentor import KernelContractInstrumentor  # noqa: PLC0415

        instrumentor = KernelContractInstrumentor()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(skip_dep_check=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM has to start
        if not os.environ.get(_ERROR_LOGGED):
            os.environ[_ERROR_LOGGED] = "1"
            _log.error("kc-otel: vLLM is not instrumented: %s", error)


_ERROR_LOGGED = "KC_OTEL_VLLM_ERROR_LOGGED"
"""Set for processes that this one starts, so that each of vLLM's does not say the same."""
