"""Receiving OTLP over any transport: limits, decoding, status codes. Received data goes to a `MetricsSink`."""
