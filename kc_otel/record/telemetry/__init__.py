"""Histograms of measured drift, and their points with the names of OpenTelemetry's SDK.

`accumulate` counts batches into histograms; `recorder_points` makes the points of each kernel pair of them, and those
about the recorder itself.
"""
