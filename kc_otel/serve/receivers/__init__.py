"""OTLP over gRPC and over HTTP."""
