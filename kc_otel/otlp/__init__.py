"""Receiving OTLP over gRPC and HTTP, and decoding it."""
