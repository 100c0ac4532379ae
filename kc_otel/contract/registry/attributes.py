"""Attributes of everything that is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ATTRIBUTES", "Attribute"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of metrics, spans or log records, of one of OpenTelemetry's types."""

    name: str
    meaning: str
    on: tuple[str, ...]
    type: str = "string"


_ATTRIBUTES: Final = (
    Attribute("kc.contract", "metadata.name of the contract.", ("metric", "span", "log")),
    Attribute("kc.contract.version", "metadata.version of the contract.", ("span", "log"), "int"),
    Attribute("kc.contract.hash", "Content hash of the contract.", ("span", "log")),
    Attribute("kc.clause", "id of a clause.", ("metric", "log")),
    Attribute("kc.clause.metric", "Metric that a clause limits, as the contract writes it.", ("metric",)),
    Attribute("kc.clause.statistic", "Statistic of it, such as mean or p99.9.", ("metric",)),
    Attribute("kc.clause.unit", "UCUM unit of the clause's limit and bounds.", ("metric",)),
    Attribute(
        "kc.clause.histogram", "Name in Prometheus of the drift histogram that a clause is judged by.", ("metric",)
    ),
    Attribute("kc.clause.promise", "What a clause allows, in words.", ("metric",)),
    Attribute("kc.incident", "id of an incident, twelve hex digits.", ("metric",)),
    Attribute(
        "kc.incident.on", "What is wrong: `fail`, `no-data`, `inconclusive` or `invalid-input`.", ("metric",)
    ),
    Attribute("kc.window", "`short` or `long`: the window that a recording rule looks at.", ("metric",)),
    Attribute("kc.slice", "Name of a slice; `all` for every token, `other` for slices over the cap.", ("metric",)),
    Attribute("kc.kernel.train", "Short fingerprint of the training kernel's version.", ("metric", "span", "log")),
    Attribute("kc.kernel.inference", "Short fingerprint of the inference kernel's version.", ("metric", "span", "log")),
    Attribute("kc.kernel.role", "`train` or `inference`.", ("metric",)),
    Attribute("kc.kernel.version", "Short fingerprint of a kernel version.", ("metric",)),
    Attribute("kc.kernel.engine", "Program that evaluates the policy, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.engine.version", "Version of that program, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.dtype", "Number format of weights and activations, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.quantization", "Quantisation method, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.kv_cache_dtype", "Number format of the KV cache, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.attention", "Attention backend, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.parallelism", "How the model is split over devices, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.compile", "Compilation mode or flags, on kc.kernel.info.", ("metric",)),
    Attribute("kc.kernel.hardware", "Device that the kernel runs on, on kc.kernel.info.", ("metric",)),
    Attribute("kc.severity", "Severity of an escalation step.", ("metric", "log")),
    Attribute(
        "kc.operator", "Name of an operator: attention, a norm, a matrix product, a router; on kc.drift.operator_* "
        "and kc.drift.route_disagreement.",
        ("metric",),
    ),
    Attribute(
        "kc.action", "Action of an escalation step as the contract writes it, such as hold-promotion, webhook:pager.",
        ("metric",),
    ),
    Attribute("kc.reason", "Why something was refused or dropped.", ("metric",)),
    Attribute("kc.outcome", "What became of it.", ("metric",)),
    Attribute("kc.transport", "`grpc` or `http`.", ("metric",)),
    Attribute("kc.endpoint", "Name of a webhook endpoint.", ("metric",)),
    Attribute("kc.shard", "Number of a shard that streams are on, from 0.", ("metric",)),
    Attribute("kc.route.kernel", "`train-kernel` or `inference-kernel`.", ("metric",)),
    Attribute("kc.verdict.status", "PASS, FAIL, INCONCLUSIVE or NO_DATA.", ("log",)),
    Attribute("kc.compare.sequences", "Sequences in a measured batch.", ("span",), "int"),
    Attribute("kc.compare.tokens", "Tokens in a measured batch, after masks.", ("span",), "int"),
    Attribute("kc.compare.slices", "Slices that the batch touched.", ("span",), "string[]"),
    Attribute(
        "kc.compare.straddling", "Sequences with tokens of several weight versions, where these are known.", ("span",),
        "int",
    ),
    Attribute("kc.compare.tv_token", "Mean (1-w)+ of the batch.", ("span",), "double"),
    Attribute("kc.compare.worst.abs_log_ratio", "Largest |l| of the batch.", ("span",), "double"),
    Attribute("kc.compare.worst.sequence", "Row of the token with the largest |l|.", ("span",), "int"),
    Attribute("kc.compare.worst.position", "Position of that token in its row.", ("span",), "int"),
    Attribute("kc.compare.worst.token_id", "Id of that token, when token ids are given.", ("span",), "int"),
    Attribute("kc.weights.train", "Weight version of the training kernel.", ("span",)),
    Attribute(
        "kc.weights.inference",
        "Weight version of the inference kernel; several, joined by commas, where an update came under way.", ("span",),
    ),
)  # fmt: skip

ATTRIBUTES: Final[dict[str, Attribute]] = {a.name: a for a in _ATTRIBUTES}
