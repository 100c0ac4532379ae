"""What is misconfigured between a service and its verdicts, as sentences with remedies.

Two looks from where the service runs: at the environment that its recorder reads, and at what the evaluator's API says
of what has arrived. Neither changes anything; the only thing sent is a connection that is closed at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kc_otel.contract import ContractError, load
from kc_otel.contract.measuring_paths import MeasuringPath, coverage
from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration

__all__ = ["Finding", "connects", "of_evaluator", "of_path", "of_sender"]

_PROTOCOLS: Final = {"grpc": 4317, "http/protobuf": 4318}
_API_PORT: Final = 4320
_SKEW: Final = 5.0
_LATE: Final = 30.0
_TAKEN: Final = frozenset({"accepted", "partial"})
_COUNTED: Final = frozenset({"accepted", "baseline", "unjudged"})
_REFUSED: Final[Mapping[str, str]] = {
    "malformed": "the sender's log has the evaluator's answer, which names the field; send with kc_otel's recorder",
    "unknown_contract": "serve the contract that the recorder was given, or give the recorder one that is served",
    "unknown_slice": "give the recorder and the evaluator the same version of the contract",
    "future": "set the sender's clock, for instance with NTP",
    "late": "set the sender's clock, or send what is buffered sooner than a long window",
    "other_buckets": "give all senders of a metric the same bucket bounds",
    "contradictory": "give every sender its own service.instance.id: two of them write one stream",
    "unordered": "send deltas in the order of their times, or cumulative sums: "
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=cumulative",
    "over_cap": "raise observability.max_series, or give senders fewer identities",
    "unjudged": "raise observability.max_series, or keep what changes all the time out of the kernels' fingerprints",
}
_REQUESTS: Final[Mapping[str, str]] = {
    "unauthenticated": "give senders a token: OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer TOKEN'",
    "forbidden": "use a token with the role `send` for the contract's tenant",
    "bad_request": "the bytes are no OTLP; is a proxy in between, or the protocol another one?",
    "too_large": "send smaller batches, or raise --max-request",
    "throttled": "more arrives than can be read; send less often, or divide contracts over evaluators",
    "not_kept": "the evaluator's disk is full or fails; its log names the folder",
    "unsupported_media": "send OTLP as protobuf or JSON, uncompressed or with gzip",
    "internal_error": "the evaluator's log has the cause",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know.

    Attributes:
        level: `error` where verdicts cannot come like this, `warning` where they may be wrong or missing, else `ok`.
        what: What is the case, one sentence.
        remedy: What to do about it; empty for `ok`.
    """

    level: str
    what: str
    remedy: str = ""


def connects(host: str, port: int) -> str:
    """Why nothing answers there; empty when something does."""
    try:
        socket.create_connection((host, port), timeout=3.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def of_sender(
    environment: Mapping[str, str],
    contracts: Sequence[Contract] = (),
    path: MeasuringPath | None = None,
    answers: Callable[[str, int], str] = connects,
) -> Iterator[Finding]:
    """What the recorder of a process with this environment would do.

    Args:
        environment: Its variables.
        contracts: Contracts that it records for, if they are known.
        path: How it measures, if that is known.
        answers: Says why nothing answers at a host and port; empty when something does.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding("error", "OTEL_SDK_DISABLED turns every recorder off", "unset OTEL_SDK_DISABLED")
    exporters = [name.strip() for name in environment.get("OTEL_METRICS_EXPORTER", "otlp").split(",") if name.strip()]
    if "otlp" in (exporters or ["otlp"]):
        yield from _endpoint(environment, answers)
    else:
        named = ",".join(exporters)
        yield Finding("error", f"OTEL_METRICS_EXPORTER={named} sends nothing here", "unset it, or add `otlp` to it")
    preference = environment.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "cumulative").strip().lower()
    if preference != "cumulative":
        yield Finding(
            "warning",
            f"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE={preference}: an export that gets lost takes its "
            "observations with it",
            "write `cumulative`: the next export then says them again",
        )
    yield from _interval(environment, contracts)
    if path is MeasuringPath.VLLM or environment.get("KC_OTEL_CONTRACT"):
        yield from _vllm(environment)
    if path is not None:
        yield from of_path(contracts, path)


def of_path(contracts: Sequence[Contract], path: MeasuringPath) -> Iterator[Finding]:
    """What a way of measuring never fills, and where attributes come from with it."""
    for contract in contracts:
        covered = coverage(contract, path)
        for clause, why in covered.unmeasured.items():
            yield Finding("warning", f"{contract.name}: {path} never measures clause {clause}", why)
        for attribute, source in covered.attributes.items():
            yield Finding("ok", f"{contract.name}: slices need `{attribute}` with every sequence: {source}")


def of_evaluator(
    health: Mapping[str, Any],
    served: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    clock: float,
    now: float,
    contracts: Sequence[Contract] = (),
) -> Iterator[Finding]:
    """What an evaluator says of itself and of what has arrived.

    Args:
        health: Its `/api/v1/health`.
        served: `contracts` of its `/api/v1/contracts`.
        verdicts: `verdicts` of its `/api/v1/verdicts`.
        clock: Unix time in seconds on its machine.
        now: Unix time in seconds on this machine, at the same moment.
        contracts: Contracts that it should judge, if they are known.
    """
    if health["evaluated_at"] is None or clock - health["evaluated_at"] > _LATE:
        yield Finding("error", "it has judged nothing in the last 30 s", "its log and /readyz say why")
    for name, sentence in health["failures"].items():
        yield Finding("error", f"{name or 'every contract'}: {sentence}", "its log has the cause; please report it")
    if abs(clock - now) > _SKEW:
        apart = format_duration(float(round(abs(clock - now))))
        yield Finding(
            "warning",
            f"this machine's clock is {apart} {'behind' if clock > now else 'ahead of'} the evaluator's",
            "set both with NTP: points of more than 30 s ahead are refused",
        )
    yield from _versions(served, contracts)
    yield from _arrived(health, served)
    yield from _silent(served, verdicts)
    for name, reasons in health["invalid"].items():
        for reason, count in reasons.items():
            what = f"{name}: {count:,} sequences failed the input check `{reason}` and are not measured"
            yield Finding("warning", what, "handbook, page Input checks: what it means and what to change")
    for one in health["outbox"]:
        if one["disabled"] or one["error"]:
            remedy = "mend the receiver" + ("; then `kc-otel enable-webhook`" if one["disabled"] else "")
            said = one["disabled"] or one["error"]
            yield Finding("warning", f"webhooks to {one['endpoint']} do not get through: {said}", remedy)


def _endpoint(environment: Mapping[str, str], answers: Callable[[str, int], str]) -> Iterator[Finding]:
    protocol = _either(environment, "PROTOCOL") or "grpc"
    if protocol not in _PROTOCOLS:
        yield Finding(
            "error", f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not supported", "write grpc or http/protobuf"
        )
        return
    given = _either(environment, "ENDPOINT")
    written = given or f"http://localhost:{_PROTOCOLS[protocol]}"
    parts = urlsplit(written if "//" in written else f"//{written}")
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host:
        yield Finding("error", f"the OTLP endpoint {written!r} names no host", "write http://HOST:PORT")
        return
    port = port or (443 if parts.scheme == "https" else 80 if protocol != "grpc" else 4317)
    wrong = list(_misdirected(environment, written, protocol, port, parts.path.rstrip("/")))
    yield from wrong
    why = answers(host, port)
    unsaid = "" if given else " (the default, as OTEL_EXPORTER_OTLP_ENDPOINT is not set)"
    if why:
        yield Finding(
            "error",
            f"nothing answers at {host}:{port}{unsaid}: {why}",
            "start `kc-otel serve` or a Collector there, or set OTEL_EXPORTER_OTLP_ENDPOINT",
        )
    elif not wrong:
        yield Finding("ok", f"recorders here send {protocol} to {host}:{port}{unsaid}, which answers")


def _misdirected(
    environment: Mapping[str, str], written: str, protocol: str, port: int, path: str
) -> Iterator[Finding]:
    """Why an exporter with this protocol gets nothing through to an endpoint, although something may answer there."""
    other = next(name for name in _PROTOCOLS if name != protocol)
    if "//" not in written and (protocol != "grpc" or _either(environment, "INSECURE").lower() != "true"):
        does = "gRPC speaks TLS to it" if protocol == "grpc" else "HTTP cannot use it"
        yield Finding("error", f"the OTLP endpoint {written} has no scheme: {does}", f"write http://{written}")
    if port == _PROTOCOLS[other]:
        yield Finding(
            "error",
            f"{written} is the usual port of {other}, and the protocol is {protocol}",
            f"write port {_PROTOCOLS[protocol]}, or OTEL_EXPORTER_OTLP_PROTOCOL={other}",
        )
    if port == _API_PORT:
        what = f"{written} is the usual port of the evaluator's page and API, which take no OTLP"
        yield Finding("error", what, f"write port {_PROTOCOLS[protocol]}")
    own = environment.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "").strip()
    if protocol == "http/protobuf" and own and not path:
        yield Finding(
            "error",
            f"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT={own} is used as it is",
            f"write {own.rstrip('/')}/v1/metrics",
        )
    if protocol == "http/protobuf" and not own and path.endswith("/v1/metrics"):
        yield Finding(
            "error", f"OTEL_EXPORTER_OTLP_ENDPOINT={written}: exporters add /v1/metrics once more", "leave it out"
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
        yield Finding("error", f"OTEL_METRIC_EXPORT_INTERVAL={text} is no number of milliseconds", "write 10000")
    for contract in contracts:
        heartbeat = contract.observability.heartbeat
        if seconds > heartbeat:
            what = f"{contract.name}: exports every {seconds:g} s, and is silent after {format_duration(heartbeat)}"
            yield Finding("error", what, "lower OTEL_METRIC_EXPORT_INTERVAL, or raise observability.heartbeat")


def _vllm(environment: Mapping[str, str]) -> Iterator[Finding]:
    from kc_otel.integrations.vllm.settings import default_spool  # noqa: PLC0415 - only where it is used

    given = environment.get("KC_OTEL_CONTRACT", "")
    if not given:
        yield Finding("error", "KC_OTEL_CONTRACT is not set, so vLLM records nothing", "set it to the contract's file")
        return
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and "kc_otel" not in [name.strip() for name in allowed.split(",")]:
        yield Finding("error", f"VLLM_PLUGINS={allowed} keeps vLLM from loading kc_otel", "add kc_otel to it")
    if not entry_points(group="vllm.general_plugins", name="kc_otel"):
        yield Finding("error", "vLLM's Python has no plugin kc_otel", "install kc-otel where vLLM is installed")
    try:
        contract = load(given)
    except (ContractError, OSError) as error:
        yield Finding("error", f"KC_OTEL_CONTRACT={given} cannot be loaded: {error}", f"kc-otel check {given}")
        return
    if environment.get("KC_OTEL_SINK"):
        return
    spool = Path(environment.get("KC_OTEL_SPOOL") or default_spool(contract, environment))
    folder = next(parent for parent in spool.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(spool if spool.exists() else folder, os.W_OK)):
        yield Finding("error", f"the spool {spool} cannot be written", "set KC_OTEL_SPOOL to a file that can be")
    else:
        yield Finding("ok", f"vLLM spools to {spool}; `kc-otel rescore` reads it there")


def _versions(served: Sequence[Mapping[str, Any]], contracts: Sequence[Contract]) -> Iterator[Finding]:
    known = {one["name"]: one for one in served}
    for contract in contracts:
        there = known.get(contract.name)
        if there is None:
            listed = ", ".join(known) or "none"
            yield Finding("error", f"it does not judge {contract.name}, only {listed}", "give `kc-otel serve` its file")
        elif there["hash"] != contract.hash:
            what = f"it judges version {there['version']} of {contract.name}, whose content is not that of this file"
            yield Finding("error", what, "restart it with this file, or give recorders the one that it has")


def _arrived(health: Mapping[str, Any], served: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    requests: dict[str, int] = {}
    for name, count in health["requests"].items():
        outcome = name.split(" ", 1)[1]
        requests[outcome] = requests.get(outcome, 0) + count
    points = health["points"]
    if not requests and not points and any(each["kernels"] for each in served):
        said = "kernels have reported; how many requests it took, this token may not see"
        yield Finding("ok", said)
        return
    taken = sum(count for outcome, count in requests.items() if outcome in _TAKEN)
    counted = sum(count for outcome, count in points.items() if outcome in _COUNTED)
    if not taken:
        yield Finding(
            "error",
            "no OTLP request was taken since it started",
            "point OTEL_EXPORTER_OTLP_ENDPOINT of the recorder's process at an OTLP port that `kc-otel serve` printed",
        )
    elif not counted:
        yield Finding(
            "error",
            f"{taken:,} OTLP requests were taken, without a point that it judges",
            "something else sends here: does the process create a kc_otel.Recorder and call compare, or is the "
            "sampling 0?",
        )
    else:
        yield Finding("ok", f"{taken:,} OTLP requests were taken, and {counted:,} points of them are judged")
    for outcome, remedy in _REQUESTS.items():
        if requests.get(outcome):
            yield Finding("warning", f"{requests[outcome]:,} requests were refused: {outcome}", remedy)
    for outcome, remedy in _REFUSED.items():
        if points.get(outcome):
            yield Finding("warning", f"{points[outcome]:,} points: {outcome}", remedy)


def _silent(served: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """What has no data, and why: a whole clause first, then slices that nothing ever matched."""
    for contract in served:
        own = [one for one in verdicts if one["contract"] == contract["name"]]
        absent = [one for one in own if one["slice"] == "all" and one["status"] == "NO_DATA"]
        for reason in dict.fromkeys(one["reason"] for one in absent):
            clauses = ", ".join(dict.fromkeys(one["clause"] for one in absent if one["reason"] == reason))
            yield Finding("error", f"{contract['name']}: no data for {clauses}", reason)
        if not any(one["observed"] and one["slice"] == "all" for one in own):
            continue
        for slice, where in contract["slices"].items():
            if own and not any(one["observed"] for one in own if one["slice"] == slice):
                asked = ", ".join(f"{name}: {value}" for name, value in where.items())
                yield Finding(
                    "warning",
                    f"{contract['name']}: slice {slice} never matched ({asked})",
                    "pass these attributes with every comparison, spelled as the contract has them",
                )
