"""Streams, panes, windows, bounds, verdicts."""
