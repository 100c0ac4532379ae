"""Streams and their log spread over Ray actors, in front of one judge: `kc-otel serve --engine ray`."""
