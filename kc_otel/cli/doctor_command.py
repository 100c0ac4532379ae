"""`kc-otel doctor`: misconfigurations between a service and its verdicts, as sentences with remedies.

Two checks from where the service runs: of the environment that its recorder reads, and of the evaluator's report on the
data that have arrived. Neither changes anything; the only thing sent is an export without metrics.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, troubles
from kc_otel.cli.terminal import PrintJson, show, unusable
from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load, load_all
from kc_otel.contract.measuring_paths import Finding, MeasuringPath, left_open
from kc_otel.contract.model import OTHERWISE_REMEDY, Contract
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import NEXT_DUE, NO_REPORT, NOTHING_TO_MEASURE, RUN_ENDED, listed
from kc_otel.judge.point_streams import OUTCOME_SENTENCES

_PORT_OF_PROTOCOL: Final = {"grpc": 4317, "http/protobuf": 4318}
_API_PORT: Final = 4320
_TAKEN_OUTCOMES: Final = frozenset({"accepted", "partial"})
_JUDGED_OUTCOMES: Final = frozenset({"accepted", "two_writers"})
_SERVED_OUTCOMES: Final = _JUDGED_OUTCOMES | {"baseline", "behind", "unjudged"}
_POINTS: Final[Mapping[str, str]] = {
    "unknown_contract": "serve the recorder's contract, or give the recorder a contract that is served",
    "unknown_slice": "give the recorder and the evaluator the same version of the contract",
    "dropped": "see the recorder's log for why it drops batches; kc.recorder.dropped counts them by reason",
    **OUTCOME_SENTENCES,
    "malformed": "points are impossible or not as OTLP has them; `kc-otel status` says of whom, and what is wrong",
}
_REQUESTS: Final[Mapping[str, str]] = {
    "unauthenticated": "give senders a token: OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer TOKEN'",
    "forbidden": "use a token with the role `send`",
    "bad_request": "the body is not OTLP; look for a proxy in between or the wrong protocol",
    "too_large": "send smaller batches, or raise --max-request",
    "throttled": "senders exceed the evaluator's capacity; export less often, or divide contracts among evaluators",
    "not_kept": "the evaluator's disk is full or failing; its log names the folder",
    "unsupported_media": "send OTLP as protobuf or JSON, uncompressed or with gzip",
    "internal_error": "see the evaluator's log for the cause",
}

_NOT_JUDGED: Final = {"NO_DATA": "data", "INVALID_INPUT": "valid data"}
_MEANT: Final = (RUN_ENDED, NEXT_DUE, NOTHING_TO_MEASURE)
"""First words of the reasons of silence that is no fault."""
_SILENT_REMEDY: Final = "restart the recorder if its process died; end one on purpose with `recorder.shutdown()`"

_error, _warning = partial(Finding, "error"), partial(Finding, "warning")


def doctor(
    contracts: Annotated[
        list[str] | None, typer.Argument(metavar="CONTRACT...", help="Contracts that should be judged; none: all.")
    ] = None,
    url: Url = DEFAULT_URL,
    path: Annotated[
        MeasuringPath | None,
        typer.Option(help="How this service measures; also lists the clauses that it can never judge."),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Find out why verdicts are missing, and print how to fix it.

    Run it where the service runs: it checks this environment, also by an export without metrics, and the evaluator.
    Exits with 1 if it finds an error, else 0.

    Examples:
      kc-otel doctor policy.yaml --path vllm
      kc-otel doctor --url https://drift.example.com
    """
    with unusable():
        loaded = load_all(contracts or [])
    if path is MeasuringPath.GATE:  # recordings are judged where they are
        sections = {"The gate": [found for contract in loaded for found in left_open(contract, path)]}
    else:
        there = _evaluator(url, loaded)  # before the export, which it would count
        sections = {
            "This process's environment": list(of_sender(os.environ, loaded, path)),
            f"The evaluator at {url}": there,
        }
    lines = []
    for name, found in sections.items():
        lines.append(name)
        for check in found or [Finding("ok", "no problem found")]:
            lines += [f"  {check.level}: {check.what}", *([f"      {check.remedy}"] if check.remedy else [])]
    show(lines, {name: list(map(asdict, found)) for name, found in sections.items()}, as_json=as_json)
    raise typer.Exit(any(check.level == "error" for found in sections.values() for check in found))


def _evaluator(url: str, contracts: Sequence[Contract]) -> list[Finding]:
    try:
        now = get(url, "/api/v1/overview")["now"]
        served, verdicts = get(url, "/api/v1/contracts")["contracts"], get(url, "/api/v1/verdicts")["verdicts"]
        return list(of_evaluator(get(url, "/api/v1/health"), served, verdicts, now, contracts))
    except typer.Exit:  # the reason is on the terminal already
        return [
            Finding("error", "its API cannot be read", "start `kc-otel serve CONTRACT...`, or pass --url and a token")
        ]


def refusal() -> str:
    """Export no metrics as recorders in this environment do; return why that is not accepted, empty if it is."""
    from kc_otel.record.telemetry.environment import try_export  # noqa: PLC0415 - loads the exporters' libraries

    return try_export()


def of_sender(
    environment: Mapping[str, str],
    contracts: Sequence[Contract] = (),
    path: MeasuringPath | None = None,
    refused: Callable[[], str] = refusal,
) -> Iterator[Finding]:
    """Check the recorder of a process with this environment; contracts and path where they are known."""
    exporters = [name.strip() for name in environment.get("OTEL_METRICS_EXPORTER", "otlp").split(",") if name.strip()]
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield _error("OTEL_SDK_DISABLED=true turns every recorder off", "unset OTEL_SDK_DISABLED")
    elif "otlp" in (exporters or ["otlp"]):
        yield from _endpoint(environment, refused)
    else:
        named = ",".join(exporters)
        yield _error(f"OTEL_METRICS_EXPORTER={named} sends nothing to an evaluator", "unset it, or add `otlp`")
    preference = environment.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "cumulative").strip().lower()
    if preference != "cumulative":
        yield _warning(
            f"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE={preference}: observations of a lost export stay lost",
            "set it to `cumulative`: the next export then repeats them",
        )
    yield from _interval(environment, contracts)
    if path is MeasuringPath.VLLM or environment.get("KC_OTEL_CONTRACT"):
        yield from _vllm(environment)
    if path is not None:
        yield from (found for contract in contracts for found in left_open(contract, path))


def of_evaluator(
    health: Mapping[str, Any],
    served: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    now: float,
    contracts: Sequence[Contract] = (),
) -> Iterator[Finding]:
    """Check an evaluator's own report and the data that has arrived, as its API has them at a Unix time there.

    `contracts` are those that it should judge, where they are known: what it says of others is left out.
    """
    yield from (_error(said, "see the evaluator's log for the cause") for said in troubles(health, now))
    yield from _versions(served, contracts)
    asked = {contract.name for contract in contracts} or {entry["name"] for entry in served}
    served = [entry for entry in served if entry["name"] in asked]
    yield from (
        _warning(f"{contract['name']}, kernel {kernel['name']}: {said}", remedy)
        for contract in served
        for kernel in contract["kernels"]
        for remedy, found in (
            (OTHERWISE_REMEDY, kernel.get("otherwise", ())),
            (_SILENT_REMEDY, [kernel["silent"]] if kernel.get("silent") else ()),
        )
        for said in found
    )
    yield from _arrived(health)
    yield from _silent(served, verdicts)
    for name in sorted(asked & health["invalid"].keys()):
        for reason, count in health["invalid"][name].items():
            yield _warning(
                f"{name}: {count:,} sequences failed the input check `{reason}` and were not measured",
                "see the handbook's page Input checks for its meaning and what to change",
            )


def _endpoint(environment: Mapping[str, str], refused: Callable[[], str]) -> Iterator[Finding]:
    protocol = _either(environment, "PROTOCOL") or "grpc"
    if protocol not in _PORT_OF_PROTOCOL:
        yield _error(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not supported", "write grpc or http/protobuf")
        return
    given = _either(environment, "ENDPOINT")
    written = given or f"http://localhost:{_PORT_OF_PROTOCOL[protocol]}"
    parts = urlsplit(written if "//" in written else f"//{written}")
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host:
        yield _error(f"the OTLP endpoint {written!r} has no host", "write http://HOST:PORT")
        return
    port = port or (443 if parts.scheme == "https" else 80 if protocol != "grpc" else 4317)
    unsaid = "" if given else " (the default, as OTEL_EXPORTER_OTLP_ENDPOINT is not set)"
    sent = f"{protocol} to {host}:{port}{unsaid}"
    if not (why := refused()):
        yield Finding("ok", f"recorders in this environment send {sent}, and an export without metrics was accepted")
        return
    yield from _misdirected(environment, written, protocol, port, parts.path.rstrip("/"))
    yield _error(
        f"recorders in this environment send {sent}, and an export without metrics was not accepted: {why}",
        f"set OTEL_EXPORTER_OTLP_ENDPOINT to the address for {protocol} that `kc-otel serve` printed, or to a "
        "Collector's, with http:// or https:// as it is served, and OTEL_EXPORTER_OTLP_HEADERS to a token if it asks",
    )


def _misdirected(
    environment: Mapping[str, str], written: str, protocol: str, port: int, path: str
) -> Iterator[Finding]:
    """Yield the likely reasons why an exporter with this protocol does not deliver to an endpoint."""
    other = next(name for name in _PORT_OF_PROTOCOL if name != protocol)
    if "//" not in written and (protocol != "grpc" or _either(environment, "INSECURE").lower() != "true"):
        does = "gRPC uses TLS" if protocol == "grpc" else "HTTP cannot use it"
        yield _error(f"the OTLP endpoint {written} has no scheme, so {does}", f"write http://{written}")
    if port == _PORT_OF_PROTOCOL[other]:
        yield _error(
            f"{written} is the usual port of {other}, but the protocol is {protocol}",
            f"write port {_PORT_OF_PROTOCOL[protocol]}, or OTEL_EXPORTER_OTLP_PROTOCOL={other}",
        )
    if port == _API_PORT:
        yield _error(
            f"{written} is the usual port of the evaluator's page and API, which accept no OTLP",
            f"write port {_PORT_OF_PROTOCOL[protocol]}",
        )
    own = environment.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "").strip()
    if protocol == "http/protobuf" and own and not path:
        yield _error(
            f"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT={own} has no path, and exporters add none",
            f"write {own.rstrip('/')}/v1/metrics",
        )
    if protocol == "http/protobuf" and not own and path.endswith("/v1/metrics"):
        yield _error(
            f"OTEL_EXPORTER_OTLP_ENDPOINT={written}: exporters append /v1/metrics a second time", "remove the path"
        )


def _either(environment: Mapping[str, str], name: str) -> str:
    own = environment.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}", "").strip()
    return own or environment.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip()


def _interval(environment: Mapping[str, str], contracts: Sequence[Contract]) -> Iterator[Finding]:
    text = environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not text:
        return
    try:
        seconds = float(text) / 1000.0
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        yield _error(
            f"OTEL_METRIC_EXPORT_INTERVAL={text} is not a positive number of milliseconds", "write one such as 10000"
        )
    for contract in contracts:
        heartbeat = contract.observability.heartbeat
        if seconds > heartbeat:
            silent = format_duration(heartbeat)
            yield _error(
                f"{contract.name}: exports are {seconds:g} s apart, and a pair is NO_DATA after {silent} of silence",
                "lower OTEL_METRIC_EXPORT_INTERVAL, or raise observability.heartbeat",
            )


def _vllm(environment: Mapping[str, str]) -> Iterator[Finding]:
    from kc_otel.integrations.vllm.settings import default_spool  # noqa: PLC0415 - only where it is used

    given = environment.get("KC_OTEL_CONTRACT", "")
    if not given:
        yield _error("KC_OTEL_CONTRACT is not set, so vLLM records nothing", "set it to the path of the contract")
        return
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and "kc_otel" not in [name.strip() for name in allowed.split(",")]:
        yield _error(f"VLLM_PLUGINS={allowed} keeps vLLM from loading kc_otel", "add kc_otel to it")
    if not entry_points(group="vllm.general_plugins", name="kc_otel"):
        yield _error("this Python environment has no vLLM plugin kc_otel", "install kc-otel where vLLM is installed")
    try:
        contract = load(given)
    except (ContractError, OSError) as error:
        yield _error(f"KC_OTEL_CONTRACT={given} cannot be loaded: {error}", f"run `kc-otel check {given}`")
        return
    spool = Path(environment.get("KC_OTEL_SPOOL") or default_spool(contract, environment))
    folder = next(parent for parent in spool.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(spool if spool.exists() else folder, os.W_OK)):
        yield _error(f"the spool {spool} cannot be written", "set KC_OTEL_SPOOL to a writable file")
    else:
        yield Finding("ok", f"vLLM spools to {spool}; `kc-otel rescore` reads it there")


def _versions(served: Sequence[Mapping[str, Any]], contracts: Sequence[Contract]) -> Iterator[Finding]:
    known = {entry["name"]: entry for entry in served}
    for contract in contracts:
        there = known.get(contract.name)
        if there is None:
            listed = ", ".join(known) or "none"
            yield _error(
                f"the evaluator does not serve {contract.name}, only {listed}", "pass its file to `kc-otel serve`"
            )
        elif there["hash"] != contract.hash:
            yield _error(
                f"the evaluator serves version {there['version']} of {contract.name}, which differs from this file",
                "restart it with this file, or give recorders the file that it serves",
            )


def _arrived(health: Mapping[str, Any]) -> Iterator[Finding]:
    requests: Counter[str] = Counter()
    for name, count in health["requests"].items():
        requests[name.split(" ", 1)[1]] += count
    points = health["points"]
    taken = sum(count for outcome, count in requests.items() if outcome in _TAKEN_OUTCOMES)
    served = sum(count for outcome, count in points.items() if outcome in _SERVED_OUTCOMES)
    judged = sum(count for outcome, count in points.items() if outcome in _JUDGED_OUTCOMES)
    if not taken:
        yield _error(
            "the evaluator had accepted no OTLP request before this check",
            "start the recorder's process, with OTEL_EXPORTER_OTLP_ENDPOINT set to an OTLP port of `kc-otel serve`",
        )
    elif not served:
        yield _error(
            f"{taken:,} OTLP requests were accepted, but none has a point of a served contract",
            "check that the process creates a kc_otel.Recorder and calls compare, and that no other program is the "
            "sender, such as an earlier `kc-otel doctor`",
        )
    elif not judged:
        yield _warning(
            f"{served:,} points of served contracts have arrived, and none is judged",
            "wait for the next export: the first one after a long pause only begins a count",
        )
    else:
        yield Finding("ok", f"{taken:,} OTLP requests were accepted, and {judged:,} of their points are judged")
    for outcome, remedy in _REQUESTS.items():
        if requests[outcome]:
            yield _warning(f"{requests[outcome]:,} requests were rejected: {outcome}", remedy)
    for outcome, remedy in _POINTS.items():
        if points.get(outcome):
            yield _warning(f"{points[outcome]:,} points were rejected or not judged: {outcome}", remedy)


def _lacking(contract: str, observed: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield what a kernel pair was not measured on and another one was: it has no cells there."""
    measured: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for verdict in observed:
        pair = verdict["kernel_inference"], verdict["kernel_train"]
        measured.setdefault(pair, set()).add((verdict["clause"], verdict["slice"]))
    everything = {place for places in measured.values() for place in places}
    for (inference, train), places in measured.items():
        lacking: dict[str, list[str]] = {}
        for clause, slice in sorted(everything - places):
            lacking.setdefault(clause, []).append(slice)
        if lacking:
            said = "; ".join(f"{clause} on {listed(slices)}" for clause, slices in lacking.items())
            yield _warning(
                f"{contract}: kernel {inference} against {train} was not measured where another one was: {said}",
                "where it serves these requests, give its recorder what the other's receives",
            )


def _silent(served: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the clauses and slices without data, and why: whole clauses first, then slices without a match."""
    for contract in served:
        own = [verdict for verdict in verdicts if verdict["contract"] == contract["name"] and not verdict["gone"]]
        absent = [verdict for verdict in own if verdict["slice"] == "all" and verdict["status"] in _NOT_JUDGED]
        fate = itemgetter("status", "reason", "no_traffic")
        for status, reason, away in dict.fromkeys(map(fate, absent)):
            clauses = ", ".join(dict.fromkeys(of["clause"] for of in absent if fate(of) == (status, reason, away)))
            level = "warning" if away or reason.startswith(_MEANT) else "error"
            why = "routers keep the requests from this kernel, as ordered; see kc-otel status" if away else reason
            yield Finding(level, f"{contract['name']}: no {_NOT_JUDGED[status]} for {clauses}", why)
        yield from _lacking(contract["name"], [verdict for verdict in own if verdict["observed"]])
        measured = {verdict["clause"] for verdict in own if verdict["observed"] and verdict["slice"] == "all"}
        if not measured:
            continue
        for slice, where in contract["slices"].items():
            there = [verdict for verdict in own if verdict["slice"] == slice and verdict["clause"] in measured]
            matched = (verdict["observed"] or verdict["status"] == "INVALID_INPUT" for verdict in there)
            if there and not any(matched):
                asked = ", ".join(f"{name}: {value}" for name, value in where.items())
                reasons = (verdict["reason"] for verdict in there if not verdict["reason"].startswith(NO_REPORT))
                why = next((why for reason in reasons if (why := reason.partition("; ")[2])), "")
                yield _warning(
                    f"{contract['name']}: slice {slice} matches nothing that is measured ({asked})",
                    why
                    or "pass these attributes with every comparison, spelled as in the contract; `kc-otel check` says "
                    "whether max_series leaves room for it",
                )
