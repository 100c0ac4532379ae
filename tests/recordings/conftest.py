from tests.record.recorder.conftest import _clean_environment, contract, memory, recorders, tracing  # noqa: F401
