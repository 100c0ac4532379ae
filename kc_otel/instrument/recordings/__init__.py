"""Recorded log-probabilities of both kernels, from the files in which people keep them."""

from kc_otel.instrument.recordings.model import Recording, RecordingError

__all__ = ["Recording", "RecordingError"]
