"""An OpenTelemetry Collector in front of several evaluators: each contract's telemetry goes to the one that judges it.

A contract has to be judged in one place: its windows, its evidence and its promise about false alarms are one. So which
evaluator has which contract is written down, once, for both: as a table of the Collector's routing connector, and as
the folder of contracts that each evaluator is started with. A load-balancing exporter would choose by a hash that
nobody can look up. Nothing is queued or batched: a sender is answered after the evaluators have answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import unique_names
from kc_otel.generate.files import GeneratedFile, as_yaml

_ADDRESS: Final = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")


def collector_files(
    contracts: Sequence[Contract], texts: Mapping[str, str], evaluators: Sequence[str]
) -> tuple[GeneratedFile, ...]:
    """The Collector's configuration, and a folder of contracts for each evaluator, `host:port` of its OTLP over gRPC.

    `texts` is the contracts' YAML by name. Raises ValueError as `placed` does, or if two contracts have the same name.
    """
    places = placed([contract.name for contract in unique_names(contracts)], evaluators)
    folders = [
        GeneratedFile(PurePosixPath("collector", "evaluators", _slug(address), f"{name}.yaml"), texts[name])
        for address, names in places.items()
        for name in names
    ]
    notes = [
        "",
        "Needs the Collector's contrib distribution: the routing connector routes single points and spans.",
        "Start each evaluator with its own contracts only; any other would report NO_DATA:",
        *(f"  kc-otel serve evaluators/{_slug(address)}    # at {address}" for address in places),
        "",
        "Evaluators with TLS or tokens: give the exporters `tls` and `auth`.",
    ]
    content = _config(unique_names(contracts), places)
    return (GeneratedFile(PurePosixPath("collector", "config.yaml"), as_yaml(content, *notes)), *folders)


def placed(contracts: Sequence[str], evaluators: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Names of contracts by the evaluator that judges them, as many each as the others, or one more.

    Each goes to the first in its own order of evaluators that has room (rendezvous hashing), so that one more evaluator
    moves few. Raises ValueError if an evaluator is no address, is named twice or would have no contract.
    """
    for address in evaluators:
        if not _ADDRESS.fullmatch(address):
            msg = f"evaluator {address!r}: is not host:port; give where it listens for OTLP/gRPC, such as judge-0:4317"
            raise ValueError(msg)
    if not evaluators or len({_slug(address) for address in evaluators}) < len(evaluators):
        raise ValueError(f"evaluators {', '.join(evaluators) or '(none)'}: name at least one, and each once")
    if len(evaluators) > len(contracts):
        msg = f"{len(evaluators)} evaluators for {len(contracts)} contracts: a contract is judged by one; name fewer"
        raise ValueError(msg)
    found: dict[str, list[str]] = {address: [] for address in evaluators}
    share, more = divmod(len(contracts), len(evaluators))
    for name in sorted(contracts):
        free = [address for address in evaluators if len(found[address]) < share + (more > 0)]
        mine = found[max(free, key=lambda address: blake2b(f"{address}\0{name}".encode(), digest_size=8).digest())]
        more -= len(mine) == share
        mine.append(name)
    return {address: tuple(names) for address, names in found.items()}


def _slug(address: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", address).strip("-")


def _config(contracts: Sequence[Contract], places: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    foreign = _foreign(contracts, places)
    wanted = " or ".join(['IsMatch(name, "^kc[.]")', *(f"name == {json.dumps(metric)}" for metric in foreign)])
    own = {
        signal: [
            {
                "context": context,
                "condition": f'attributes["kc.contract"] == {json.dumps(name)}',
                "pipelines": [f"{signal}/{_slug(address)}"],
            }
            for address, names in places.items()
            for name in names
        ]
        for signal, context in (("metrics", "datapoint"), ("traces", "span"))
    }
    of_others = [
        {"context": "metric", "condition": f"name == {json.dumps(metric)}", "pipelines": pipelines}
        for metric, pipelines in foreign.items()
    ]
    first = _slug(next(iter(places)))
    connectors: dict[str, Any] = {
        # Of a contract that nobody has: the first evaluator counts it as such, and its Health shows it.
        "routing/metrics": {
            "error_mode": "propagate",
            "default_pipelines": [f"metrics/{first}"],
            "table": own["metrics"] + of_others,
        },
        "routing/traces": {"error_mode": "propagate", "table": own["traces"]},
    }
    pipelines: dict[str, Any] = {}
    for signal, processors in (("metrics", ["memory_limiter", "filter/ours"]), ("traces", ["memory_limiter"])):
        into = f"routing/{signal}"
        pipelines[f"{signal}/in"] = {"receivers": ["otlp"], "processors": processors, "exporters": [into]}
        for address in places:
            pipelines[f"{signal}/{_slug(address)}"] = {
                "receivers": [into],
                "exporters": [f"otlp_grpc/{_slug(address)}"],
            }
    return {
        "receivers": {
            "otlp": {
                "protocols": {
                    "grpc": {"endpoint": "0.0.0.0:4317", "max_recv_msg_size_mib": 16},
                    "http": {"endpoint": "0.0.0.0:4318"},
                }
            }
        },
        "processors": {
            "memory_limiter": {"check_interval": "1s", "limit_mib": 512, "spike_limit_mib": 128},
            "filter/ours": {"error_mode": "propagate", "metrics": {"metric": [f"not ({wanted})"]}},
        },
        "exporters": {
            f"otlp_grpc/{_slug(address)}": {
                "endpoint": address,
                "tls": {"insecure": True},
                "sending_queue": {"enabled": False},
                "retry_on_failure": {"enabled": False},
            }
            for address in places
        },
        "connectors": connectors,
        "service": {"pipelines": pipelines},
    }


def _foreign(contracts: Sequence[Contract], places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Pipelines by metric, of metrics that know no contract: each evaluator gets those that a contract of its names."""
    asked = {
        contract.name: {clause.metric for clause in contract.clauses if clause.metric.startswith("gen_ai.")}
        for contract in contracts
    }
    return {
        metric: [
            f"metrics/{_slug(address)}" for address, names in places.items() if any(metric in asked[n] for n in names)
        ]
        for metric in sorted(set().union(*asked.values()))
    }
