"""One command, `kc-otel`."""
