"""Export of measured drift over OTLP, through the OpenTelemetry SDK's public API.

`accumulate` counts batches into histograms, on the host or a device; `pair_streams` makes the points of one kernel pair
of them, `counters` those about the recorder itself, `compare_span` a span per batch, and `export` sends them.
"""
