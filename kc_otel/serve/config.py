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
    """Addresses, state and links of the evaluator.

    Attributes:
        host: Address that every port binds to; loopback unless told otherwise.
        grpc_port: OTLP over gRPC; 0 lets the system choose.
        http_port: OTLP over HTTP; 0 lets the system choose.
        api_port: API, `/metrics`, health; 0 lets the system choose.
        state: SQLite file; None keeps nothing across restarts.
        set_aside_damaged: Where the state file is damaged, give it another name and begin without it.
        tick: Seconds between two evaluations.
        external_url: How a person reaches the API, for links in webhooks; None for the bound address.
        group_wait: Seconds from the first alert of an incident to its webhook, which says all that fired until then.
        group_interval: Seconds between a webhook about an incident and an update.
        webhooks: False lets webhooks whose endpoint is not configured wait in the outbox instead of refusing to start.
        dry_run: Judge every contract without consequences: actions are only recorded.
        dry_run_contracts: Names of contracts to judge so, where not all are.
        standby: Where another evaluator holds the state file, wait until it ends, and take over then.
        record: Keep what arrives, and when it was judged, for `kc-otel replay`: the folder STATE-recording.
        record_limit: Bytes of it that are kept.
        allowed_hosts: Host names, besides `localhost`, `host` and that of `external_url`, that API, page and OTLP/HTTP
            answer to; addresses need none.
        access: File of tokens; None asks nobody who they are.
        worst: Files of worst sequences that `kc-otel rescore --worst` keeps; none shows none.
        tls_certificate: PEM file of the certificate that every port shows; None speaks without TLS.
        tls_key: PEM file of its key.
        tls_client_authority: PEM file of the authorities whose certificates clients have to show; None asks for none.
        allow_unauthenticated: Listen where other machines reach it although nothing asks them who they are.
        log_format: Whether a line of the log is a sentence, or a JSON object with the attributes of what it is about.
        max_request_bytes: Largest OTLP request, also after decompression.
        engine: Whether streams are in this process, or on the shards of a Ray cluster.
        ray_address: The cluster: `auto`, `local` or `host:port`.
        shards: How many shards there are.
        shard_folder: Folder that every node of the cluster reaches, where shards keep their state.
        shard_cpus: Cores of a node that Ray keeps for a shard.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 4317
    http_port: int = 4318
    api_port: int = 4320
    state: Path | None = None
    set_aside_damaged: bool = False
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
