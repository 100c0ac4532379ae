from tests.record.recorder.conftest import _clean_environment, contract, held, memory, recorders, tracing  # noqa: F401
