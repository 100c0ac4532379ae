"""kc-otel: kernel contracts on OpenTelemetry."""
