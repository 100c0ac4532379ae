"""The evaluator process: listen, tick, deliver, and stop cleanly. One event loop, one thread.

The holder of the state file acts, a standby waits for it, with no port open. The lock is the operating system's, so two
never act at once, and a holder that is killed is followed within a second. That is right among processes of one
machine, or of machines of which one at a time has the disk (a ReadWriteOnce volume). Network file systems differ in
what becomes of a lock when a machine loses touch; do not put the file on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kc_otel import machine_code
from kc_otel._extras import MissingExtraError
from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.judge.decisions import LATE_SECONDS
from kc_otel.judge.escalation.escalate import GroupTiming
from kc_otel.judge.escalation.webhook_body import links_note
from kc_otel.judge.otlp.requests import BindError, Limits, MetricsSink
from kc_otel.judge.promotion.gate_evidence import SectionProblems, unchecked_offline
from kc_otel.serve.access.access_file import AccessFile
from kc_otel.serve.access.site_guard import GuardedSite, HostNames, OwnSite, reachable_from_elsewhere
from kc_otel.serve.access.tls import Tls
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.config import LogFormat, ServeConfig, StreamEngine
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import WRITING, DurableSink, TrafficRecording, TrafficRecordingError, recover
from kc_otel.serve.log_format import JsonFormatter, PlainFormatter
from kc_otel.serve.receivers.grpc_server import serve_grpc
from kc_otel.serve.receivers.http_server import HttpReceiver, connections_per_port, listen, serving_http
from kc_otel.serve.receivers.request_taker import ByteBudget, RequestTaker
from kc_otel.serve.self_metrics import SelfMetrics, TelemetryExporter, read
from kc_otel.serve.shards import RayShard, ShardedSink, ShardError, ray_cluster
from kc_otel.serve.store.state_file import StateConnection, StateError, StateHeldError, open_state
from kc_otel.serve.watched_files import UnusableFileError
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import EndpointFiles

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_log: Final = logging.getLogger(__name__)
_GRACE_SECONDS: Final = 3.0
_M_MMAP_THRESHOLD: Final = -3
"""Of malloc.h."""
_LARGE_BLOCK: Final = 1024 * 1024
_GC_YOUNG_OBJECTS: Final = 20_000
"""Objects after which the collector looks for cycles: a tick makes as many that have none, and a request some tens."""


_STARTUP_ERRORS: Final = (
    *(UnusableFileError, BindError, StateError, TrafficRecordingError, ShardError, MissingExtraError),
)
"""Errors whose own message says what to do."""


class ServiceError(Exception):
    """The evaluator cannot start; the message says what to do."""


def run(
    contracts: Sequence[Contract], config: ServeConfig, offline_problems: SectionProblems = unchecked_offline
) -> None:
    """Serve until SIGINT or SIGTERM; `offline_problems` checks the offline section of promotions' evidence."""
    handler = logging.StreamHandler()
    sentences = PlainFormatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if config.log_format is LogFormat.JSON else sentences)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _closed(config)
    _return_large_blocks()
    if config.record and config.state is None:
        raise ServiceError("--record keeps what arrives beside the state file; name one with --state FILE")
    try:
        dry_run = _dry_run(contracts, config)
        acting = [contract for contract in contracts if contract.name not in dry_run]
        endpoints = EndpointFiles(_endpoint_names(acting), os.environ, required=config.webhooks)
        with ray_cluster(config) if config.engine is StreamEngine.RAY else contextlib.nullcontext():
            # Not uvloop: it accepts connections itself, past the bound that each port's listener sets.
            asyncio.run(_serve(contracts, config, endpoints, dry_run, offline_problems))
    except _STARTUP_ERRORS as error:
        raise ServiceError(str(error)) from None


def _closed(config: ServeConfig) -> None:
    """Refuse to listen where others reach us and nothing asks who they are."""
    if config.worst and config.access is None and reachable_from_elsewhere(config.host):
        raise ServiceError(
            f"--worst shows people's prompts and answers, and --host {config.host} lets other machines read them; "
            "give --access FILE, whose tokens say may: [read, prompts]"
        )
    tokens_or_certificates = config.access is not None or config.tls_client_authority is not None
    if tokens_or_certificates or config.allow_unauthenticated or not reachable_from_elsewhere(config.host):
        return
    raise ServiceError(
        f"--host {config.host} lets other machines send, read and act here unauthenticated; "
        "give --access FILE with tokens (kc-otel token makes them), or --tls-client-ca FILE for mutual TLS; leave "
        "--host out to listen on loopback; or pass --allow-unauthenticated if the network keeps everybody else away"
    )


def _dry_run(contracts: Sequence[Contract], config: ServeConfig) -> frozenset[str]:
    names = [contract.name for contract in contracts]
    for name in config.dry_run_contracts:
        if name not in names:
            raise ServiceError(f"--dry-run-contract: no contract {name!r} is served; there are {', '.join(names)}")
    return frozenset(names if config.dry_run else config.dry_run_contracts)


def _endpoint_names(contracts: Sequence[Contract]) -> set[str]:
    return {
        str(action.target)
        for contract in contracts
        for step in contract.escalation
        for action in step.do
        if action.kind == "webhook"
    }


async def _serve(
    contracts: Sequence[Contract],
    config: ServeConfig,
    endpoints: EndpointFiles,
    dry_run: frozenset[str],
    offline_problems: SectionProblems,
) -> None:
    stop, tls = _stop_on_signals(), _tls(config)
    if (connection := await active(config.state, stop, standby=config.standby)) is None:
        return
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(connection.close)
        core = Core(
            contracts,
            connection,
            external_url="",
            now=time.time(),
            worst=config.worst,
            dry_run=dry_run,
            timing=GroupTiming(config.group_wait, config.group_interval),
            offline_problems=offline_problems,
        )
        stack.push_async_callback(core.aclose)
        if config.state is not None:
            _log.info("the state is in %s, %s", config.state.absolute(), _state_text(core))
        most = connections_per_port()
        api_socket, http_socket = (
            stack.enter_context(contextlib.closing(listen(config.host, port, what, most)))
            for port, what in ((config.api_port, "the API"), (config.http_port, "OTLP/HTTP"))
        )
        api_port, core.otlp_port = (listener.getsockname()[1] for listener in (api_socket, http_socket))
        core.external_url = _address(config, tls, api_port, endpoints.endpoints)
        dispatcher = Dispatcher(core.outbox, endpoints.endpoints, turn=core.turn)
        budget = ByteBudget(limits := Limits(max_bytes=config.max_request_bytes))
        requests, decided = Counter[tuple[str, str]](), Changes()
        access = None if config.access is None else AccessFile(config.access)

        def self_metrics() -> SelfMetrics:
            return read(core, requests, dispatcher.attempts, budget.in_flight)

        speaker = TelemetryExporter(self_metrics(), own_ports={config.grpc_port, core.otlp_port})
        stack.callback(speaker.shutdown)
        core.events.announce = speaker.transition

        def ticked() -> None:
            for renewable in (access, tls):
                if renewable is not None:
                    renewable.renew()
            if endpoints.renew():
                dispatcher.configure(endpoints.endpoints)
            dispatcher.wake()
            if speaker.speaks:
                speaker.publish(self_metrics())

        external = urlsplit(config.external_url or "")
        names = HostNames((config.host, *config.allowed_hosts, external.hostname or ""))
        sink, tick = await stack.enter_async_context(sink_of(core, config, limits))
        taker = RequestTaker(sink, limits, budget, access)
        grpc, grpc_port = await serve_grpc(taker, config.host, config.grpc_port, requests, tls, most)
        stack.push_async_callback(grpc.stop, _GRACE_SECONDS)
        await stack.enter_async_context(serving_http(HttpReceiver(taker, requests, names), http_socket, tls))
        site: ASGIApp = make_api(core, self_metrics, decided, version("kc-otel"))
        if access is not None:
            site = GuardedSite(access, site, requests)
        await stack.enter_async_context(serving_http(OwnSite(site, names, external.netloc.lower()), api_socket, tls))
        tasks = [
            asyncio.create_task(_tick_forever(core, config, tick, decided, ticked)),
            asyncio.create_task(dispatcher.run()),
        ]
        stack.push_async_callback(_cancel, tasks)
        stack.push_async_callback(decided.close)
        _log.info(
            "judging %s; OTLP/gRPC %s:%d, OTLP/HTTP %s://%s:%d, API %s://%s:%d",
            ", ".join(f"{contract.name} v{contract.metadata.version}" for contract in contracts)
            + f" (dry: {', '.join(sorted(dry_run))})" * bool(dry_run),
            config.host, grpc_port, _scheme(tls), config.host, core.otlp_port,
            _scheme(tls), config.host, api_port,
        )  # fmt: skip
        gc.freeze()  # what start-up made stays for good; the collector need not look at it again
        gc.set_threshold(_GC_YOUNG_OBJECTS, 50, 100)
        await _until(stop, tasks)
        _log.info("stopping")


def _state_text(core: Core) -> str:
    """How old a state is that was read."""
    if core.evaluator.judged_at <= 0.0:
        return "a new file: no routes, pins, silences or promotions are in force"
    return f"evaluated last {format_duration(round(core.age))} ago: no order that was given since is in it"


@contextlib.asynccontextmanager
async def sink_of(
    core: Core, config: ServeConfig, limits: Limits
) -> AsyncIterator[tuple[MetricsSink, Callable[[], Awaitable[None]]]]:
    """Return the core's sink for exports (the inbox in the state file, or the shards), and what evaluates every cell.

    Requests that are in the inbox and not in the snapshot are applied. A ShardError if the state file's streams are
    where the other engine has them: they would count twice.
    """
    state = config.state
    if core.merged and config.engine is StreamEngine.PROCESS:
        raise ShardError(
            f"{state}: its streams are on shards, and would count twice here; go on with --engine ray, or begin with "
            "another --state"
        )
    if not core.merged and config.engine is StreamEngine.RAY and (len(core.inbox) or core.evaluator.stream_count):
        raise ShardError(
            f"{state}: one process has written it, and its streams would count twice on shards; go on without --engine "
            "ray, or begin with another --state"
        )
    if config.engine is StreamEngine.RAY:
        assert config.shard_folder is not None
        folder, contracts = config.shard_folder.absolute(), list(core.contracts.values())
        sharded = ShardedSink(
            core, lambda number: RayShard(config.shard_cpus, contracts, folder / f"shard-{number:03d}", limits)
        )
        with contextlib.closing(sharded):
            await sharded.start(config.shards)
            yield sharded, sharded.tick
        return
    if not machine_code.is_available():
        _log.warning("messages take several times as long to process: %s", machine_code.ABSENT)
    if count := recover(core):
        _log.info("%s: %d requests that were received and not yet in the snapshot are applied", state, count)
    if not config.record or state is None:
        yield DurableSink(core), core.evaluate
        return
    folder = state.with_name(f"{state.name}-recording")
    with contextlib.closing(TrafficRecording(folder, config.record_limit)) as core.recording:
        yield DurableSink(core, core.recording.received), core.evaluate


def _address(config: ServeConfig, tls: Tls | None, port: int, endpoints: Collection[str]) -> str:
    """Return the base URL of links in messages; warn where only this machine can open it."""
    address = config.external_url or f"{_scheme(tls)}://{config.host}:{port}"
    if endpoints and (note := links_note(address)):
        _log.warning("messages link to %s. %s", address, note)
    return address


def _return_large_blocks() -> None:
    """Have glibc give large blocks back to the system; by itself it keeps those that messages of megabytes took."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _tls(config: ServeConfig) -> Tls | None:
    """Return the TLS settings of the ports; warn where tokens would travel unencrypted."""
    certificate, key = config.tls_certificate, config.tls_key
    if certificate is not None and key is not None:
        return Tls(certificate, key, config.tls_client_authority)
    if certificate is not None or key is not None or config.tls_client_authority is not None:
        raise UnusableFileError("--tls-cert and --tls-key are given together, and --tls-client-ca only with them")
    if config.access is not None and reachable_from_elsewhere(config.host):
        _log.warning("tokens travel without TLS; give --tls-cert and --tls-key, or put a proxy with TLS in front")
    return None


def _scheme(tls: Tls | None) -> str:
    return "http" if tls is None else "https"


async def _until(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until somebody stops the process, or a task fails."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in done - {stopping}:
        task.result()


_MAX_REST_SECONDS: Final = LATE_SECONDS / 3


async def _tick_forever(
    core: Core, config: ServeConfig, tick: Callable[[], Awaitable[None]], decided: Changes, ticked: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    following = loop.time()
    while True:
        core.connection.check_place()  # a file that is no longer there ends the process: somebody else may be acting
        before = core.decisions.version
        faults = core.evaluator.faults
        try:
            await tick()
            faults.report("", "the evaluation", {})
            faults.report("", WRITING, {})
        except StateError as error:  # a full disk: received data stays in memory, and the write is retried
            faults.report("", WRITING, {"all contracts": error})
        except Exception as error:  # noqa: BLE001 - nothing of it was written; senders and people are still served
            faults.report("", "the evaluation", {"all contracts": error})
        try:
            ticked()
            faults.report("", "telling others", {})
        except Exception as error:  # noqa: BLE001 - who is told less is still judged
            faults.report("", "telling others", {"metrics or webhooks": error})
        if core.decisions.version != before:
            await decided.notify()
        # As much time as an evaluation takes is left to those who send and ask; the disk takes none of it. More than
        # this is a machine that slept in the middle of one.
        following = max(following + config.tick, loop.time() + min(core.tick_seconds, _MAX_REST_SECONDS))
        await asyncio.sleep(following - loop.time())


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_LOOK_SECONDS: Final = 0.5


async def active(path: Path | None, stop: asyncio.Event, *, standby: bool) -> StateConnection | None:
    """The state file, open and held; with `standby`, as soon as nobody else holds it. None when told to stop first."""
    if not standby:
        return open_state(path)
    waited = False
    while not stop.is_set():
        try:
            connection = open_state(path, patience=0.0)
        except StateHeldError:
            if not waited:
                _log.info("standing by: another evaluator holds %s", path)
            waited = True
        else:
            if waited:
                _log.info("taking over: %s is free", path)
            return connection
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await stop.wait()
    return None
