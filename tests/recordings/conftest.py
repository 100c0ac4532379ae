from tests.record.recorder.conftest import _clean_environment, contract, held, logprobs, memory, recorders, tracing  # noqa: F401
