"""`kc-otel serve`: the evaluator process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kc_otel.cli.terminal import refuse, seconds
from kc_otel.serve.config import LogFormat, ServeConfig, StreamEngine, Sync

__all__ = ["register"]

_DEFAULT = ServeConfig()
_MIB = 1024 * 1024


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    contracts: Annotated[list[Path], typer.Argument(help="Contract files, or folders of them.", metavar="CONTRACT...")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT.host,
    grpc_port: Annotated[int, typer.Option(help="OTLP over gRPC; 0: any free port.")] = _DEFAULT.grpc_port,
    http_port: Annotated[int, typer.Option(help="OTLP over HTTP; 0: any free port.")] = _DEFAULT.http_port,
    api_port: Annotated[int, typer.Option(help="API, /metrics, health; 0: any free port.")] = _DEFAULT.api_port,
    state: Annotated[
        Path, typer.Option(help="SQLite file of what must survive a restart; `:memory:` keeps nothing.")
    ] = Path("kc-otel.sqlite"),
    set_aside_damaged: Annotated[
        bool,
        typer.Option("--set-aside-damaged", help="Begin without a state file that is damaged, and keep it beside."),
    ] = _DEFAULT.set_aside_damaged,
    sync: Annotated[
        Sync, typer.Option(help="Force what arrives to the disk before the sender is told that it was taken, or never.")
    ] = _DEFAULT.sync,
    tick: Annotated[float, typer.Option(help="Seconds between evaluations.", min=0.05)] = _DEFAULT.tick,
    external_url: Annotated[
        str | None, typer.Option(help="How a person reaches the API, for links in webhooks.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that all but OTLP/gRPC answers to; may be given several times.", metavar="NAME"),
    ] = None,
    access: Annotated[
        Path | None,
        typer.Option(help="File of tenants and tokens; `kc-otel token` makes an entry of it.", metavar="FILE"),
    ] = None,
    worst: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of `kc-otel rescore --worst`: the page shows prompts; may be given several times.",
            metavar="FILE",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate that every port shows.", metavar="FILE")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.", metavar="FILE")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of authorities whose certificates clients have to show.", metavar="FILE"),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Listen where other machines reach it, and let all of them in."),
    ] = _DEFAULT.allow_unauthenticated,
    webhooks: Annotated[
        bool, typer.Option(help="Refuse to start while a webhook endpoint is not configured.")
    ] = _DEFAULT.webhooks,
    group_wait: Annotated[
        str, typer.Option(help="How long the first webhook about an incident waits for what belongs to it: 30s, 0s.")
    ] = f"{_DEFAULT.group_wait:g}s",
    group_interval: Annotated[
        str, typer.Option(help="Time between a webhook about an incident and an update.")
    ] = f"{_DEFAULT.group_interval / 60:g}m",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only record what would be done: nothing is sent, routed or asked for.")
    ] = _DEFAULT.dry_run,
    dry_run_contract: Annotated[
        list[str] | None, typer.Option(help="Run only this contract dry; may be given several times.", metavar="NAME")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="If another evaluator holds the state file, wait and take over.")
    ] = _DEFAULT.standby,
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines of the log as sentences, or as JSON objects with attributes.")
    ] = _DEFAULT.log_format,
    max_request: Annotated[
        int, typer.Option(help="MiB of the largest OTLP request, also after decompression.", min=1)
    ] = _DEFAULT.max_request_bytes // _MIB,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what arrives in the log beside the state file, for `kc-otel replay`.")
    ] = _DEFAULT.record,
    record_limit: Annotated[
        int, typer.Option(help="MiB of it that are kept; the oldest goes first.", min=1)
    ] = _DEFAULT.record_limit // _MIB,
    engine: Annotated[
        StreamEngine,
        typer.Option(help="Where streams are taken: this process, or shards on a Ray cluster."),
    ] = _DEFAULT.engine,
    ray_address: Annotated[
        str, typer.Option(help="The cluster: auto, local, or HOST:PORT of its head.", metavar="ADDRESS")
    ] = _DEFAULT.ray_address,
    shards: Annotated[int, typer.Option(help="Shards that streams are spread over.", min=1)] = _DEFAULT.shards,
    shard_folder: Annotated[
        Path | None,
        typer.Option(help="Where shards keep log and state: a folder that every node of the cluster reaches."),
    ] = _DEFAULT.shard_folder,
    shard_cpus: Annotated[
        float, typer.Option(help="Cores that Ray keeps for each shard.", min=0.0)
    ] = _DEFAULT.shard_cpus,
) -> None:
    """Receive OTLP, judge it against the contracts, and carry out their escalation policy.

    Webhook endpoints named by the contracts are read from the environment:
    KC_OTEL_WEBHOOK_<NAME>_URL, KC_OTEL_WEBHOOK_<NAME>_SECRET (or _SECRET_FILE), KC_OTEL_WEBHOOK_<NAME>_FORMAT
    (kernel-contract, alertmanager, grafana, pagerduty or slack), KC_OTEL_WEBHOOK_<NAME>_AUTHORIZATION (or _FILE), and
    KC_OTEL_WEBHOOK_<NAME>_ALLOW_PRIVATE=1 for a receiver on loopback or in a private network.
    """
    from kc_otel.contract import ContractError, load_all  # noqa: PLC0415 - a quick --help
    from kc_otel.serve.server import ServiceError, run  # noqa: PLC0415

    config = ServeConfig(
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        api_port=api_port,
        state=None if str(state) == ":memory:" else state,
        set_aside_damaged=set_aside_damaged,
        sync=sync,
        tick=tick,
        external_url=external_url,
        allowed_hosts=tuple(allowed_host or ()),
        access=access,
        worst=tuple(worst or ()),
        tls_certificate=tls_cert,
        tls_key=tls_key,
        tls_client_authority=tls_client_ca,
        allow_unauthenticated=allow_unauthenticated,
        webhooks=webhooks,
        group_wait=seconds("--group-wait", group_wait),
        group_interval=seconds("--group-interval", group_interval),
        dry_run=dry_run,
        dry_run_contracts=tuple(dry_run_contract or ()),
        standby=standby,
        record=record,
        record_limit=record_limit * _MIB,
        log_format=log_format,
        max_request_bytes=max_request * _MIB,
        engine=engine,
        ray_address=ray_address,
        shards=shards,
        shard_folder=shard_folder,
        shard_cpus=shard_cpus,
    )
    try:
        run(load_all(contracts), config)
    except (ContractError, ServiceError) as error:
        refuse(error)
