"""`kc-otel serve` and `token`: the evaluator process, and who may call it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kc_otel.cli.terminal import in_sections, refuse, seconds
from kc_otel.contract.load import load_all
from kc_otel.serve.config import LogFormat, ServeConfig, StreamEngine

_DEFAULTS = ServeConfig()
_BYTES_PER_MIB = 1024 * 1024
_port = partial(typer.Option, min=0, max=65_535)
_file = partial(typer.Option, metavar="FILE")


@in_sections(
    {
        "Addresses": "host grpc_port http_port api_port external_url allowed_host max_request",
        "Access": "access tls_cert tls_key tls_client_ca allow_unauthenticated worst",
        "State": "state standby record record_limit",
        "Actions and messages": "webhooks group_wait group_interval dry_run dry_run_contract",
        "Shards on a Ray cluster": "engine ray_address shards shard_folder shard_cpus",
    }
)
def serve(
    contracts: Annotated[list[Path], typer.Argument(help="Contract files, or folders of them.", metavar="CONTRACT...")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    grpc_port: Annotated[int, _port(help="OTLP over gRPC; 0: any free port.")] = _DEFAULTS.grpc_port,
    http_port: Annotated[int, _port(help="OTLP over HTTP; 0: any free port.")] = _DEFAULTS.http_port,
    api_port: Annotated[int, _port(help="API, /metrics, health; 0: any free port.")] = _DEFAULTS.api_port,
    state: Annotated[
        Path, typer.Option(help="SQLite file with everything that must survive a restart; `:memory:` keeps nothing.")
    ] = Path("kc-otel.sqlite"),
    tick: Annotated[float, typer.Option(help="Seconds between evaluations.", min=0.05)] = _DEFAULTS.tick,
    external_url: Annotated[
        str | None,
        typer.Option(
            help="Address at which people reach the API, such as https://drift.example.com; links in messages "
            "start with it."
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name that the API and OTLP/HTTP accept; repeatable.", metavar="NAME"),
    ] = None,
    access: Annotated[Path | None, _file(help="File of tokens; `kc-otel token` prints an entry for it.")] = None,
    worst: Annotated[
        list[Path] | None, _file(help="File of `kc-otel rescore --worst`: the page then shows prompts; repeatable.")
    ] = None,
    tls_cert: Annotated[Path | None, _file(help="PEM file of the certificate of every port.")] = None,
    tls_key: Annotated[Path | None, _file(help="PEM file of its key.")] = None,
    tls_client_ca: Annotated[
        Path | None, _file(help="PEM file of the authorities from which clients need a certificate.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Allow every machine that can connect, without tokens.")
    ] = _DEFAULTS.allow_unauthenticated,
    webhooks: Annotated[
        bool, typer.Option(help="Refuse to start while a webhook endpoint is not configured.")
    ] = _DEFAULTS.webhooks,
    group_wait: Annotated[
        str, typer.Option(help="How long the first webhook about an incident waits for related alerts: 30s, 0s.")
    ] = f"{_DEFAULTS.group_wait:g}s",
    group_interval: Annotated[
        str, typer.Option(help="Time between a webhook about an incident and an update.")
    ] = f"{_DEFAULTS.group_interval / 60:g}m",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only record the actions of the policy: nothing is sent, routed or requested."),
    ] = _DEFAULTS.dry_run,
    dry_run_contract: Annotated[
        list[str] | None, typer.Option(help="Dry run for this contract only; repeatable.", metavar="NAME")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="If another evaluator holds the state file, wait and take over.")
    ] = _DEFAULTS.standby,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log lines as sentences, or as JSON objects with attributes.")
    ] = _DEFAULTS.log_format,
    max_request: Annotated[
        int, typer.Option(help="Largest OTLP request in MiB, also after decompression.", min=1)
    ] = _DEFAULTS.max_request_bytes // _BYTES_PER_MIB,
    record: Annotated[
        bool, typer.Option("--record", help="Keep all exports in STATE-recording, for `kc-otel replay`.")
    ] = _DEFAULTS.record,
    record_limit: Annotated[
        int, typer.Option(help="MiB of exports to keep; the oldest are deleted first.", min=1)
    ] = _DEFAULTS.record_limit // _BYTES_PER_MIB,
    engine: Annotated[
        StreamEngine, typer.Option(help="Where streams are processed: in this process, or in shards on a Ray cluster.")
    ] = _DEFAULTS.engine,
    ray_address: Annotated[
        str, typer.Option(help="The cluster: auto, local, or HOST:PORT of its head.", metavar="ADDRESS")
    ] = _DEFAULTS.ray_address,
    shards: Annotated[int, typer.Option(help="Number of shards.", min=1)] = _DEFAULTS.shards,
    shard_folder: Annotated[
        Path | None, typer.Option(help="Folder for the shards' state, which every node of the cluster must reach.")
    ] = _DEFAULTS.shard_folder,
    shard_cpus: Annotated[
        float, typer.Option(help="Cores that Ray reserves for each shard.", min=0.0)
    ] = _DEFAULTS.shard_cpus,
) -> None:
    """Receive OTLP, judge it against contracts, and carry out their escalation policy.

    The webhook endpoints that contracts name are read from the environment:
    KC_OTEL_WEBHOOK_<NAME>_URL, KC_OTEL_WEBHOOK_<NAME>_SECRET (or _SECRET_FILE), KC_OTEL_WEBHOOK_<NAME>_FORMAT
    (kernel-contract, pagerduty or slack), KC_OTEL_WEBHOOK_<NAME>_AUTHORIZATION (or _FILE), and
    KC_OTEL_WEBHOOK_<NAME>_ALLOW_PRIVATE=1 for a receiver on loopback or in a private network.

    Examples:
      kc-otel serve policy.yaml
      kc-otel serve contracts --state /var/lib/kc-otel/state.sqlite --external-url https://drift.example.com
      kc-otel serve contracts --host 0.0.0.0 --access tokens.yaml --tls-cert tls.crt --tls-key tls.key
    """
    from kc_otel.contract.errors import ContractError  # noqa: PLC0415 - a quick --help
    from kc_otel.serve.server import ServiceError, run  # noqa: PLC0415

    config = ServeConfig(
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        api_port=api_port,
        state=None if str(state) == ":memory:" else state,
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
        record_limit=record_limit * _BYTES_PER_MIB,
        log_format=log_format,
        max_request_bytes=max_request * _BYTES_PER_MIB,
        engine=engine,
        ray_address=ray_address,
        shards=shards,
        shard_folder=shard_folder,
        shard_cpus=shard_cpus,
    )
    try:
        run(load_all(contracts), config, _offline_problems)
    except (ContractError, ServiceError) as error:
        refuse(error)


def _offline_problems(record: Mapping[str, Any]) -> list[str]:
    """Check evidence of the offline stage; the offline gate is only loaded for the first."""
    from kc_otel.offline.gate.evidence import section_problems  # noqa: PLC0415

    return section_problems(record)


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of its holder, which events show.")],
    may: Annotated[list[str], typer.Option(help="send, read, act, prompts or diagnose; repeatable.")],
    out: Annotated[
        Path | None, _file(help="New file for the token (mode 0600); without it, the token is printed.")
    ] = None,
) -> None:
    """Create a token, and print its entry for the file of `kc-otel serve --access`.

    The entry goes to standard output. The token goes to --out, or to standard output below the entry. It is shown only
    once, because the evaluator keeps only its digest.

    Examples:
      kc-otel token rollouts --may send --out rollouts.token
      kc-otel token ada --may read --may act
    """
    import yaml  # noqa: PLC0415 - a quick --help

    from kc_otel.serve.access.access_file import Role, digest_of, new_token  # noqa: PLC0415

    if unknown := sorted(set(may) - {*Role}):
        refuse(f"--may {unknown[0]}: write {', '.join(Role)}")
    made = new_token()
    if out is not None:
        try:
            with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(made + "\n")
        except OSError as error:
            refuse(f"{out}: {error.strerror}; a token never takes the place of another file")
    entry = {"name": name, "may": list(dict.fromkeys(may)), "sha256": digest_of(made)}
    print("- " + yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip())
    if out is None:
        print(made)
