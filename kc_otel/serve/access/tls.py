"""TLS and mutual TLS on every port, from files that are read again when they change.

The next handshake has the new files: the listening context begins each in the newest context, whose keys for tickets
are its own, so that a client of a removed authority cannot resume its session either.
"""

from __future__ import annotations

import ssl
from asyncio import sslproto
from pathlib import Path
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.serve.watched_files import UnusableFileError, WatchedFiles

with extra("serve", "the evaluator"):
    import grpc

_READ_BYTES: Final = 32 * 1024
"""Bytes that asyncio has ready for what comes on each TLS connection, idle ones too; 256 KiB are its own choice. It can
only be said for all connections of a process."""


class _Newest(ssl.SSLContext):
    """Begins each handshake in another context."""

    newest: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake, as asyncio expects of a context."""
        return self.newest.wrap_bio(*arguments, **options)


class Tls(WatchedFiles):
    """Certificates that the ports present and require, in PEM files; the key is without a password.

    The certificate is followed by those between it and its authority. Clients are asked for a certificate where
    `client_authority` has the authorities that may have issued it.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None = None) -> None:
        sslproto.SSLProtocol.max_size = _READ_BYTES
        self.listening = _Newest(ssl.PROTOCOL_TLS_SERVER)
        """For every listening socket of asyncio."""
        self._for_grpc: Any = None
        super().__init__((certificate, key, *(() if client_authority is None else (client_authority,))))

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC port that rereads the files at each handshake."""
        shown = self._for_grpc

        def newer() -> Any:
            nonlocal shown
            if shown is self._for_grpc:
                return None
            shown = self._for_grpc
            return shown

        return grpc.dynamic_ssl_server_credentials(shown, newer, require_client_authentication=len(self._paths) > 2)

    def _read(self) -> None:
        certificate, key, *authority = self._paths
        contents = [_content(path) for path in self._paths]
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise UnusableFileError(
                f"{certificate} and {key}: are no certificate and its key ({_why(error)})"
            ) from None
        if authority:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(authority[0])
            except (ssl.SSLError, OSError) as error:
                raise UnusableFileError(
                    f"{authority[0]}: holds no certificates of authorities ({_why(error)})"
                ) from None
        self.listening.newest = context
        self._for_grpc = grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], *contents[2:])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableFileError(f"{path}: cannot be read ({error.strerror})") from None


def _no_password() -> str:
    raise ValueError("the key requires a password; give a key without one, readable by the service only")


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
