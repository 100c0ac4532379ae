"""A clean environment."""

from tests.record.recorder.conftest import _clean_environment

__all__ = ["_clean_environment"]
