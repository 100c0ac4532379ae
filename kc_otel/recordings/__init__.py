"""Recorded log-probabilities of both kernels, from the files in which people keep them."""

from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.recording_files import load_recording, save_recording

__all__ = ["Recording", "RecordingError", "load_recording", "save_recording"]
