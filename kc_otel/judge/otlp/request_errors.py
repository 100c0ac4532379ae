"""Errors of a request, and the status that each sends.

    ReceiveError
    |-- BadRequestError        400  INVALID_ARGUMENT    do not retry: the same bytes will fail again
    |-- UnauthenticatedError   401  UNAUTHENTICATED     do not retry: give a token
    |-- ForbiddenError         403  PERMISSION_DENIED   do not retry: the token is not for this
    |-- UnsupportedMediaError  415  INVALID_ARGUMENT    do not retry
    |-- TooLargeError          413  RESOURCE_EXHAUSTED  do not retry: send smaller batches
    |-- ThrottledError         503  UNAVAILABLE         retry after `retry_after` seconds
    |-- InternalError          500  INTERNAL            a fault of the receiver; its log has the cause
    BindError                  the address cannot be listened on

Codes as the OTLP specification 1.11 has them, sections "Failures" and "OTLP/HTTP Response".
"""

from __future__ import annotations

from typing import ClassVar


class ReceiveError(Exception):
    """A request that is not accepted."""

    http_status: ClassVar[int] = 400
    code: ClassVar[int] = 3
    """google.rpc.Code, which gRPC's status codes are."""
    outcome: ClassVar[str] = "bad_request"
    """Value of `kc.outcome` on kc.evaluator.requests."""


class BadRequestError(ReceiveError):
    """The bytes are not what the content type says."""


class UnauthenticatedError(ReceiveError):
    """Nobody knows who sends this."""

    http_status = 401
    code = 16
    outcome = "unauthenticated"


class ForbiddenError(ReceiveError):
    """The sender is known and lacks the role."""

    http_status = 403
    code = 7
    outcome = "forbidden"


class UnsupportedMediaError(ReceiveError):
    """The content type or the content encoding is not one that OTLP has."""

    http_status = 415
    outcome = "unsupported_media"


class TooLargeError(ReceiveError):
    """The request is over the limit, as received or after decompression."""

    http_status = 413
    code = 8
    outcome = "too_large"


class ThrottledError(ReceiveError):
    """The receiver cannot take more at the moment; a sink may raise it.

    Senders give up when `retry_after` is more than is left of their own deadline (10 s by default), so keep it short.
    """

    http_status = 503
    code = 14
    outcome = "throttled"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InternalError(ReceiveError):
    """A fault of the receiver, not of the request."""

    http_status = 500
    code = 13
    outcome = "internal_error"


class BindError(OSError):
    """An address cannot be listened on; the message says what to do."""
