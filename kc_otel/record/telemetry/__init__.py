"""Histograms of measured drift, and their points with the names of OpenTelemetry's SDK.

`accumulate` counts batches into histograms; `pair_streams` makes the points of one kernel pair of them, `counters`
those about the recorder itself.
"""
