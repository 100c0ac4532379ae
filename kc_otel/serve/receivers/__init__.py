"""OTLP over gRPC and over HTTP."""

from kc_otel._extras import require

require("serve", "the evaluator", "uvicorn", "httptools")
