"""TLS and mutual TLS on every port, from files that are read again when they change.

A connection that has begun keeps its certificates; the next handshake has the new ones. The listening contexts begin
each handshake in the newest context, whose keys for tickets are its own: who was let in by an authority that has since
been taken away cannot resume that session either.
"""

from __future__ import annotations

import logging
import ssl
from asyncio import sslproto
from pathlib import Path
from typing import Any, Final

__all__ = ["Tls", "TlsError"]

_log: Final = logging.getLogger(__name__)
_READ: Final = 32 * 1024
"""Bytes that asyncio has ready for what comes on each TLS connection, idle ones too; 256 KiB are its own choice. It can
only be said for all connections of a process."""


class TlsError(Exception):
    """Certificate, key or authority cannot be used; the message says which file."""


class _Newest(ssl.SSLContext):
    """Begins each handshake in another context."""

    newest: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """What asyncio begins a handshake with."""
        return self.newest.wrap_bio(*arguments, **options)


class Tls:
    """What the ports show and ask for.

    Args:
        certificate: PEM file of the certificate, with those between it and its authority.
        key: PEM file of its private key, without a password.
        client_authority: PEM file of the authorities whose certificates clients have to show; None to ask for none.

    Raises:
        TlsError: If they cannot be used.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None = None) -> None:
        self._files = (certificate, key, *(() if client_authority is None else (client_authority,)))
        self._seen = self._stamp()
        sslproto.SSLProtocol.max_size = _READ
        self.listening = _Newest(ssl.PROTOCOL_TLS_SERVER)
        """For every listening socket of HTTP/1.1, by asyncio."""
        self.listening_http2 = _Newest(ssl.PROTOCOL_TLS_SERVER)
        """For those of HTTP/2, which both sides say in the handshake."""
        self._read()

    def renew(self) -> None:
        """Read the files again if one has changed; what cannot be used leaves what was in force, and is logged."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._read()
        except TlsError as error:
            _log.error("%s; the certificate that was in force still is", error)
        else:
            _log.info("%s: a new certificate is in force", self._files[0])

    def _read(self) -> None:
        for_http, for_http2 = self._make(), self._make()
        for_http2.set_alpn_protocols(["h2"])
        self.listening.newest, self.listening_http2.newest = for_http, for_http2

    def _make(self) -> ssl.SSLContext:
        certificate, key, *authority = self._files
        for path in self._files:
            _content(path)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise TlsError(f"{certificate} and {key}: are no certificate and its key ({_why(error)})") from None
        if authority:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(authority[0])
            except (ssl.SSLError, OSError) as error:
                raise TlsError(f"{authority[0]}: holds no certificates of authorities ({_why(error)})") from None
        return context

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: cannot be read ({error.strerror})") from None


def _no_password() -> str:
    raise ValueError("the key asks for a password; give one that asks for none, readable by the service only")


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
