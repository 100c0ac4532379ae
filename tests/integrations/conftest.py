from tests.record.recorder.conftest import _clean_environment, contract, memory, recorders  # noqa: F401 - fixtures
