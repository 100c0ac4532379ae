"""Drift from tensors: sampled log-probabilities and full logits, in NumPy and torch."""
