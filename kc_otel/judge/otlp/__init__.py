"""Receiving OTLP over any transport: limits, decoding, status codes. What arrives goes to a `TelemetrySink`."""

from kc_otel.judge.otlp.request_errors import (
    BadRequestError,
    BindError,
    ReceiveError,
    ThrottledError,
    TooLargeError,
    UnsupportedMediaError,
)
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import ExportResult, RequestCounts, TelemetrySink

__all__ = [
    "BadRequestError",
    "BindError",
    "ExportResult",
    "Limits",
    "ReceiveError",
    "RequestCounts",
    "TelemetrySink",
    "ThrottledError",
    "TooLargeError",
    "UnsupportedMediaError",
]
