"""Recorded log-probabilities of both kernels, from the files in which people keep them."""
