from tests.record.recorder.conftest import (
    _clean_environment,
    contract,
    held,
    logprobs,
    memory,
    recorders,
    tracing,
)

__all__ = ["_clean_environment", "contract", "held", "logprobs", "memory", "recorders", "tracing"]
