"""Settings of `kc-otel serve`, with cautious defaults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class StreamEngine(StrEnum):
    """Place where streams are processed."""

    PROCESS = "process"
    RAY = "ray"


class LogFormat(StrEnum):
    """Format of a log line."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The options of `kc-otel serve`, whose help explains them; a `state` of None keeps nothing across restarts."""

    host: str = "127.0.0.1"
    grpc_port: int = 4317
    http_port: int = 4318
    api_port: int = 4320
    state: Path | None = None
    tick: float = 1.0
    external_url: str | None = None
    group_wait: float = 30.0
    group_interval: float = 300.0
    webhooks: bool = True
    dry_run: bool = False
    dry_run_contracts: tuple[str, ...] = ()
    standby: bool = False
    record: bool = False
    record_limit: int = 1024 * 1024 * 1024
    allowed_hosts: tuple[str, ...] = ()
    access: Path | None = None
    worst: tuple[Path, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_authority: Path | None = None
    allow_unauthenticated: bool = False
    log_format: LogFormat = LogFormat.TEXT
    max_request_bytes: int = 16 * 1024 * 1024
    engine: StreamEngine = StreamEngine.PROCESS
    ray_address: str = "auto"
    shards: int = 1
    shard_folder: Path | None = None
    shard_cpus: float = 1.0
