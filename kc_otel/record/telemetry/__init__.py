"""Histograms, spans and counters: from measured drift to OTLP, through the OpenTelemetry SDK's public API."""
