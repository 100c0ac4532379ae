"""Who may send telemetry, and about which contracts; the same for OTLP over gRPC and over HTTP."""

from __future__ import annotations

from typing import Any, Final

from kc_otel.judge.otlp.request_errors import ForbiddenError, UnauthenticatedError
from kc_otel.judge.otlp.sender_contracts import restrict
from kc_otel.serve.access.access_file import AccessFile, Caller, Role

__all__ = ["Senders"]

_ANYBODY: Final = Caller("", "", frozenset({Role.SEND}), None, "")


class Senders:
    """Knows senders by their tokens.

    Args:
        access: The tokens; None where nobody is asked.
    """

    def __init__(self, access: AccessFile | None = None) -> None:
        self._access = access

    @property
    def anybody(self) -> bool:
        """Whether nobody is asked who they are: requests are taken as they come."""
        return self._access is None

    def known(self, authorization: str) -> Caller:
        """Who sends a request, by its `Authorization` header or metadata.

        Raises:
            UnauthenticatedError: If that is nobody.
            ForbiddenError: If they may not send.
        """
        if self._access is None:
            return _ANYBODY
        caller = self._access.bearer(authorization)
        if caller is None:
            raise UnauthenticatedError(
                "say who sends this: authorization: Bearer and a token, by OTEL_EXPORTER_OTLP_HEADERS"
            )
        if Role.SEND not in caller.roles:
            raise ForbiddenError(f"the token of {caller.name} is not for sending; it would have to say may: [send]")
        return caller

    def admit(self, caller: Caller, request: Any) -> Any:
        """The request, about the contracts of its sender only."""
        if self._access is not None:
            restrict(request, caller.contracts)
        return request
