"""The contract C = (N, S, R, O, Pi) as frozen data. The comments on the fields are the documentation of the YAML.

What can be judged from one field alone is judged here; what takes two places to see (duplicate ids, slices that
nobody declared, limits that contradict the assumptions) is in `lint.py`. `load.py` gives every error its file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import (
    Field,
    field_validator,
)

from kc_otel.contract.clause import Clause
from kc_otel.contract.fields import Duration, Name, Number, Strict
from kc_otel.contract.policy import REPEAT, EscalationStep
from kc_otel.contract.promotion import PromotionTerms
from kc_otel.contract.registry import BY_SEQUENCE, Unit
from kc_otel.contract.slices import ALL, OTHER, Scalar, SliceCondition, match, parse_condition
from kc_otel.contract.units import parse_limit

__all__ = [
    "Assumptions",
    "Contract",
    "KernelSpec",
    "KernelSpecs",
    "Metadata",
    "Observability",
    "SliceSpec",
]


class Metadata(Strict):
    """Who the contract belongs to."""

    name: Name
    """Name of the contract; it is an attribute of every metric, so keep it short and stable."""
    version: int = Field(ge=1, strict=True)
    """Counts up with every change; it travels on every verdict and webhook."""
    owner: str = Field(min_length=1, max_length=200)
    """Team or person that answers for it."""
    description: str = Field(default="", max_length=2000)
    """One sentence for the person who is woken."""
    runbook: str | None = None
    """Link that alerts carry."""


class KernelSpec(Strict):
    """What a kernel is expected to be; what it really was is measured as a fingerprint."""

    engine: str = Field(min_length=1, max_length=100)
    """Program that evaluates the policy, such as torch, vllm, sglang."""
    dtype: str | None = None
    """Number format, such as bfloat16, fp8, int8."""
    quantization: str | None = None
    """Quantisation method, such as awq, gptq, compressed-tensors."""
    attention: str | None = None
    """Attention backend, such as FLASH_ATTN, TRITON_ATTN."""
    kv_cache_dtype: str | None = None
    """Number format of the KV cache."""


class KernelSpecs(Strict):
    """The pair that the contract is about."""

    train: KernelSpec
    """P: the kernel that gradients are taken through, or the reference in serving."""
    inference: KernelSpec
    """Q: the kernel that samples."""


class Assumptions(Strict):
    """Constants that turn drift into reward and gradient. They are measured, not trusted."""

    reward_range: tuple[Number, Number] | None = None
    """Smallest and largest reward of a sequence."""
    horizon: int | None = Field(default=None, ge=1, strict=True)
    """Longest sequence, in generated tokens."""
    advantage_max: Number | None = Field(default=None, gt=0)
    """Largest absolute advantage."""
    score_norm_max: Number | None = Field(default=None, gt=0)
    """Largest norm of one token's score, grad log pi."""
    clip: Number | None = Field(default=None, gt=0)
    """PPO clip range epsilon: ratios stay in [1-epsilon, 1+epsilon]."""

    @field_validator("reward_range")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not (math.isfinite(value[0]) and math.isfinite(value[1]) and value[0] < value[1]):
            msg = f"[{value[0]:g}, {value[1]:g}] is not a range; write the smallest reward first, such as [0, 1]"
            raise ValueError(msg)
        return value


class SliceSpec(Strict):
    """A part of the traffic that is judged on its own."""

    where: dict[str, Any] = Field(
        min_length=1,
        json_schema_extra={
            "additionalProperties": {
                "anyOf": [
                    {"type": ["string", "number", "boolean"]},
                    {"type": "array", "items": {"type": ["string", "number", "boolean"]}, "minItems": 1},
                ]
            }
        },
    )
    """Attribute to value, list of values, or comparison (`">= 8192"`). All of them must hold."""
    description: str = Field(default="", max_length=500)
    """One sentence for dashboards and webhooks."""

    @field_validator("where")
    @classmethod
    def _parses(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, raw in value.items():
            try:
                parse_condition(raw)
            except ValueError as error:
                msg = f"{name}: {error}"
                raise ValueError(msg) from None
        return value

    @cached_property
    def conditions(self) -> Mapping[str, tuple[SliceCondition, ...]]:
        """The parsed conditions, by attribute."""
        return {name: parse_condition(raw) for name, raw in self.where.items()}

    def matches(self, attributes: Mapping[str, Scalar]) -> bool:
        """Whether a sequence with these attributes belongs to the slice."""
        return match(self.conditions, attributes)


class Observability(Strict):
    """How much is looked at, over which windows, and how sure a verdict has to be."""

    window: Duration = 300.0
    """Rolling window that alarms look at."""
    long_window: Duration = 3600.0
    """Rolling window that decides where the short one cannot."""
    confidence: Number = Field(default=0.99, gt=0.5, lt=1.0)
    """At one evaluation and for one cell, the chance that a window's interval holds the truth, and that a PASS is
    right, is at least this."""
    false_alarms: Duration = 30 * 86400.0
    """The expected time between false alarms, FAILs of what keeps its limit, is at least this for all cells of the
    contract together."""
    min_samples: int = Field(default=2000, ge=1, strict=True)
    """Below this many tokens, rows of an operator's output, or observations of a `gen_ai.*` histogram, a cell does not
    PASS; a FAIL has evidence of its own."""
    # Intervals are valid at any size; the minimum guards what they assume, that a window is more than one burst of
    # alike requests. 100 sequences is where gross drift can be told: even where a quantity in [0, 1] was 0 in all of
    # them, no interval of confidence 0.99 excludes a mean of 0.052 = 1 - 0.005^(1/100), half of alpha being each
    # window's; at 1000 sequences it is 0.0053. Asking for 2000, as of tokens, would leave small slices without a
    # verdict that they are able to give.
    min_sequences: int = Field(default=100, ge=1, strict=True)
    """Below this many sequences a cell that is judged by sequence does not PASS; a FAIL has evidence of its own."""
    sampling: Number = Field(default=1.0, gt=0.0, le=1.0)
    """Share of batches that the recorder measures."""
    heartbeat: Duration = 60.0
    """Silence after which a kernel pair is NO_DATA."""
    max_series: int = Field(default=2000, ge=1, strict=True)
    """Most streams kept per contract; the rest is counted as slice `other`."""

    def minimum(self, clause: Clause) -> tuple[str, int]:
        """Name and value of the minimum that a mean, quantile or fraction is subject to."""
        if clause.quantity is not None and clause.quantity.per is Unit.SEQUENCE:
            return "min_sequences", self.min_sequences
        return "min_samples", self.min_samples


class Contract(Strict):
    """A kernel contract: numerical, statistical, runtime and observability clauses and an escalation policy."""

    apiVersion: Literal["kernel-contract/v1"]  # noqa: N815 - the YAML's own name
    kind: Literal["KernelContract"]
    metadata: Metadata
    kernels: KernelSpecs
    assumptions: Assumptions = Assumptions()
    slices: dict[Name, SliceSpec] = Field(default_factory=dict, max_length=500)
    """Parts of the traffic that are judged on their own; they may overlap. `all` is always there."""
    numerical: tuple[Clause, ...] = Field(default=(), max_length=200)
    """N: what the operators may do to the logits."""
    statistical: tuple[Clause, ...] = Field(default=(), max_length=200)
    """S: what may happen to the distributions, rewards and gradients."""
    runtime: tuple[Clause, ...] = Field(default=(), max_length=200)
    """R: what may happen to freshness and latency."""
    observability: Observability = Observability()
    """O: what is measured, how often, how surely."""
    escalation: tuple[EscalationStep, ...] = Field(default=(), max_length=50)
    """Pi: what happens on a breach."""
    promotion: PromotionTerms = PromotionTerms()
    """What a kernel version has to show before it serves more."""

    @field_validator("slices")
    @classmethod
    def _not_reserved(cls, value: dict[str, SliceSpec]) -> dict[str, SliceSpec]:
        for name in (ALL, OTHER):
            if name in value:
                msg = f"{name!r} is reserved; choose another name"
                raise ValueError(msg)
        return value

    @property
    def name(self) -> str:
        """metadata.name."""
        return self.metadata.name

    @property
    def clauses(self) -> tuple[Clause, ...]:
        """Every clause: numerical, statistical, runtime."""
        return (*self.numerical, *self.statistical, *self.runtime)

    @property
    def by_sequence(self) -> tuple[str, ...]:
        """Keys of the token quantities whose means over sequences some clause is about, in the registry's order."""
        asked = {clause.quantity.key for clause in self.clauses if clause.by_sequence and clause.quantity is not None}
        return tuple(token for token, quantity in BY_SEQUENCE.items() if quantity.key in asked)

    def acts_on(self, clause: Clause) -> tuple[str, ...]:
        """What acts on the verdicts of a clause: actions and alerts above a warning of the policy, and promotion.

        Promotion is named where the contract writes its terms; a gate of a contract that does not write them is run by
        hand.
        """
        found = [what for step in self.escalation for what in step.acts_on(clause.id)]
        return tuple(dict.fromkeys([*found, *(["promotion"] if "promotion" in self.model_fields_set else [])]))

    def tail_of(self, clause: Clause) -> Clause | None:
        """The clause that limits how often what a clause with a cap observes is above the cap, if there is one."""
        if clause.cap is None or clause.quantity is None:
            return None
        for other in self.clauses:
            statistic, same = other.parsed_statistic, other.quantity is not None and other.quantity.key
            if same != clause.quantity.key or other.operator != clause.operator:
                continue
            if statistic.kind == "fraction" and statistic.argument <= clause.cap:
                return other
        return None

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that some clause is about, in the contract's order, each once."""
        return tuple(dict.fromkeys(clause.operator for clause in self.clauses if clause.operator is not None))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the contract's content; spelling, order of keys and comments do not count. 64 hex digits."""
        content = self.model_dump(mode="json", by_alias=True)
        if self.promotion == PromotionTerms():
            del content["promotion"]  # contracts from before there was such a section keep their hash
        elif not self.promotion.sampling:
            del content["promotion"]["sampling"]  # those from before sampling could be listed keep theirs
        if self.observability.false_alarms == Observability().false_alarms:
            del content["observability"]["false_alarms"]  # contracts from before it could be said keep their hash
        for section in ("numerical", "statistical", "runtime"):
            content[section] = [_meaning(clause) for clause in getattr(self, section)]
        for name, spec in self.slices.items():
            content["slices"][name]["where"] = {
                attribute: [[condition.comparison, *condition.values] for condition in conditions]
                for attribute, conditions in spec.conditions.items()
            }
        for written, step in zip(content["escalation"], self.escalation, strict=True):
            if step.repeat == REPEAT:
                del written["repeat"]  # contracts from before there were reminders keep their hash
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def slices_of(self, attributes: Mapping[str, Scalar]) -> tuple[str, ...]:
        """Names of the slices that a sequence with these attributes belongs to, `all` first."""
        return (ALL, *(name for name, spec in self.slices.items() if spec.matches(attributes)))


def _meaning(clause: Clause) -> dict[str, Any]:
    """A clause's content with its limits in the metric's unit, its statistic and its unit spelled out."""
    statistic, quantity = clause.parsed_statistic, clause.quantity
    content = clause.model_dump(mode="json")
    if clause.operator is None:
        del content["operator"]  # contracts from before there were operators keep their hash
    return {
        **content,
        "statistic": [statistic.kind, statistic.argument],
        "unit": quantity and str(quantity.per),
        "limit": parse_limit(clause.limit, clause.limit_unit),
        "slices": {name: clause.limit_for(name) for name in clause.slices},
    }
