"""Export of measured drift over OTLP, through the OpenTelemetry SDK's public API.

`accumulate` counts batches into histograms; `pair_streams` makes the points of one kernel pair
of them, `counters` those about the recorder itself, and `export` sends them.
"""
