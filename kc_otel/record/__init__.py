"""Recorder of two kernels' log-probabilities, logits and operators, for a trainer or an engine to import.

`measure` computes drift in NumPy and torch, `telemetry` turns it into OTLP, and the other modules connect the two.
"""
