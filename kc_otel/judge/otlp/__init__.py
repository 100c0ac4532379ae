"""Receiving OTLP over gRPC and HTTP: limits, decoding, status codes. What arrives goes to a `Sink`.

The servers are in `grpc_server` and `http_server`; they are not imported here, so that naming a `Sink` costs nothing.
"""

from kc_otel.judge.otlp.errors import (
    BadRequestError,
    BindError,
    ReceiveError,
    ThrottledError,
    TooLargeError,
    UnsupportedMediaError,
)
from kc_otel.judge.otlp.limits import Limits
from kc_otel.judge.otlp.sink import Outcome, RequestCounts, Sink

__all__ = [
    "BadRequestError",
    "BindError",
    "Limits",
    "Outcome",
    "ReceiveError",
    "RequestCounts",
    "Sink",
    "ThrottledError",
    "TooLargeError",
    "UnsupportedMediaError",
]
