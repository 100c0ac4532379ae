"""Served traffic scored again with the training kernel, by slice, to verdicts: `python -m examples.rescore`."""
