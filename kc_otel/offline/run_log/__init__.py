"""Logs that a trainer has already written: their scalars by step, and what can be said of them."""
