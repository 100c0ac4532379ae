"""Who sends: HTTP as it is on the wire, and unary gRPC calls of bytes."""

import gzip
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from tests.conformance.payloads import JSON, PROTOBUF

TIMEOUT = 20.0
PERMANENT = {
    *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND),
    *(grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED),
    *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL),
}
"""Codes that the table of OTLP/gRPC's failures never has retried."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes

    @property
    def media(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def message(self, kind: Any) -> Any:
        """The body as a message, in the encoding that the content type says."""
        body = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        if self.media == JSON:
            return json_format.Parse(body, kind(), ignore_unknown_fields=True)
        assert self.media == PROTOBUF, f"the answer's content type is {self.media!r}: {body[:200]!r}"
        return kind.FromString(body)

    def problem(self) -> Any:
        assert self.status >= 400, f"accepted with {self.status}: {self.body[:200]!r}"
        return self.message(Status)


class HttpClient:
    """One connection, which is opened again where the server has closed it."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        assert parts.hostname, f"--target {target!r} is not like http://127.0.0.1:4318"
        self.base = parts.path.rstrip("/")
        self.connection = HTTPConnection(parts.hostname, parts.port or 4318, timeout=TIMEOUT)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Any request; `_` in a header's name stands for `-`, and a body that is an iterator is sent in chunks."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        chunked = isinstance(body, Iterator)
        # A server may answer before it has read everything, and hang up.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.request(method, self.base + path, body, named, encode_chunked=chunked)
        response = self.connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())

    def post(self, path: str, body: Any, encoding: str, **headers: str) -> Answer:
        return self.send("POST", path, body, content_type=encoding, **headers)

    def close(self) -> None:
        self.connection.close()


def call(channel: grpc.Channel, method: str, body: bytes, *, compressed: bool = False) -> bytes:
    how = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression
    return channel.unary_unary(method)(body, timeout=TIMEOUT, compression=how)


def failure(channel: grpc.Channel, method: str, body: bytes, *, compressed: bool = False) -> Any:
    try:
        taken = call(channel, method, body, compressed=compressed)
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"accepted with {taken[:200]!r}")


def retry_info(error: Any) -> Any:
    """The RetryInfo among the details of a call's status; None if there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in Status.FromString(value).details:
                found = error_details_pb2.RetryInfo()
                if detail.Unpack(found):
                    return found
    return None
