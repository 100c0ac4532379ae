"""The contract C = (N, S, R, O, Pi) as frozen data. The comments on the fields are the documentation of the YAML.

What can be judged from one field alone is judged here; what takes two places to see (duplicate ids, slices that
nobody declared, limits that contradict the assumptions) is in `lint.py`. `load.py` gives every error its file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kc_otel.contract.registry import DERIVED, QUANTITIES, known_metrics
from kc_otel.contract.slices import ALL, OTHER, Condition, Scalar, match, parse_condition
from kc_otel.contract.units import format_duration, parse_duration, parse_limit

__all__ = [
    "Action",
    "Assumptions",
    "Clause",
    "Contract",
    "KernelSpec",
    "Kernels",
    "Metadata",
    "Observability",
    "SliceSpec",
    "Statistic",
    "Step",
]

NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
_STATISTIC: Final = re.compile(
    r"mean|max|p(?P<rank>\d{1,2}(?:\.\d{1,4})?)|fraction\s*>\s*(?P<above>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Number = Annotated[float, Field(strict=True)]
"""A number that is written as one: neither true nor "0.5" in quotes."""
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(le=366 * 86400.0),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(\d+(\.\d+)?(ns|us|ms|s|m|h|d))+$", "examples": ["5m", "1h30m"]}),
]
RawLimit = Annotated[Number | str, WithJsonSchema({"type": ["number", "string"], "examples": [0.004, "800ms", "2%"]})]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)


class Metadata(_Model):
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


class KernelSpec(_Model):
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


class Kernels(_Model):
    """The pair that the contract is about."""

    train: KernelSpec
    """P: the kernel that gradients are taken through, or the reference in serving."""
    inference: KernelSpec
    """Q: the kernel that samples."""


class Assumptions(_Model):
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


class SliceSpec(_Model):
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
    def conditions(self) -> Mapping[str, tuple[Condition, ...]]:
        """The parsed conditions, by attribute."""
        return {name: parse_condition(raw) for name, raw in self.where.items()}

    def matches(self, attributes: Mapping[str, Scalar]) -> bool:
        """Whether a sequence with these attributes belongs to the slice."""
        return match(self.conditions, attributes)


class Statistic(_Model):
    """What of a metric's distribution a clause limits."""

    kind: Literal["mean", "max", "quantile", "fraction"]
    argument: float = 0.0
    """Rank in (0,1) for a quantile, threshold for a fraction."""

    @classmethod
    def parse(cls, text: str) -> Statistic:
        """From `mean`, `max`, `p99.9` or `fraction > 0.5`.

        Raises:
            ValueError: If it is none of these.
        """
        found = _STATISTIC.fullmatch(text.strip())
        if not found:
            msg = f"{text!r} is not a statistic; write mean, max, p99.9 or fraction > 0.5"
            raise ValueError(msg)
        if found["rank"] is not None:
            rank = float(found["rank"]) / 100.0
            if not 0.0 < rank < 1.0:
                msg = f"{text!r} is not a quantile; ranks lie between p0 and p100, both excluded"
                raise ValueError(msg)
            return cls(kind="quantile", argument=rank)
        if found["above"] is not None:
            return cls(kind="fraction", argument=float(found["above"]))
        return cls(kind="mean" if text.strip() == "mean" else "max")


class Clause(_Model):
    """One promise: a statistic of a metric stays at or below a limit, on every slice."""

    id: Name
    """Name of the clause, unique in the contract."""
    metric: str
    """A metric of the registry (`kc-otel metrics` lists them), or a `gen_ai.*` histogram."""
    statistic: str | None = None
    """mean, max, pXX.X or `fraction > x`; each metric has a default."""
    limit: RawLimit
    """Largest value allowed, in the metric's unit; durations and percentages may carry their unit."""
    slices: dict[Name, RawLimit] = Field(default_factory=dict, max_length=500)
    """Limits of single slices, where they differ."""
    cap: Number | None = Field(default=None, gt=0)
    """For the mean of an unbounded metric: intervals are for the mean of min(value, cap)."""
    description: str = Field(default="", max_length=1000)
    """Why the limit has its value, and what breaks beyond it."""

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in known_metrics() and not value.startswith("gen_ai."):
            from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

            near = get_close_matches(value, known_metrics(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(known_metrics())}, or gen_ai.*"
            msg = f"{value!r} is not a metric; {hint}"
            raise ValueError(msg)
        return value

    @field_validator("statistic")
    @classmethod
    def _reads(cls, value: str | None) -> str | None:
        if value is not None:
            Statistic.parse(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Clause:
        # A message that starts with the path of a field is shown at that field's line.
        if self.metric in DERIVED and self.parsed_statistic.kind != "mean":
            msg = f"statistic: {self.metric} is defined by a mean; leave the statistic out"
            raise ValueError(msg)
        for path, raw in (("limit", self.limit), *((f"slices.{name}", raw) for name, raw in self.slices.items())):
            try:
                parse_limit(raw, self.unit)
            except ValueError as error:
                msg = f"{path}: {error}"
                raise ValueError(msg) from None
        return self

    @property
    def unit(self) -> str:
        """UCUM unit of the limit: the metric's, or 1 for a fraction."""
        if self.parsed_statistic.kind == "fraction":
            return "1"
        if self.metric in QUANTITIES:
            return QUANTITIES[self.metric].unit
        if self.metric in DERIVED:
            return DERIVED[self.metric].unit
        return "s"

    @cached_property
    def parsed_statistic(self) -> Statistic:
        """The statistic, the metric's default when the clause names none."""
        if self.statistic is not None:
            return Statistic.parse(self.statistic)
        if self.metric in QUANTITIES:
            return Statistic.parse(QUANTITIES[self.metric].statistic)
        return Statistic.parse("mean" if self.metric in DERIVED else "p99")

    @property
    def statistic_text(self) -> str:
        """The statistic as a contract writes it."""
        parsed = self.parsed_statistic
        if parsed.kind == "quantile":
            return f"p{100 * parsed.argument:.10g}"
        return f"fraction > {parsed.argument:g}" if parsed.kind == "fraction" else parsed.kind

    def limit_for(self, slice: str) -> float:
        """Limit on a slice, in the metric's unit."""
        return parse_limit(self.limit if slice == ALL else self.slices.get(slice, self.limit), self.unit)


class Observability(_Model):
    """How much is looked at, over which windows, and how sure a verdict has to be."""

    window: Duration = 300.0
    """Rolling window that alarms look at."""
    long_window: Duration = 3600.0
    """Rolling window that decides where the short one cannot."""
    confidence: Number = Field(default=0.99, gt=0.5, lt=1.0)
    """Chance that no PASS cell fails is at least this; the rest is split over cells for FAIL."""
    min_samples: int = Field(default=2000, ge=1, strict=True)
    """Below this many observations a cell is INCONCLUSIVE."""
    sampling: Number = Field(default=1.0, gt=0.0, le=1.0)
    """Share of batches that the recorder measures."""
    heartbeat: Duration = 60.0
    """Silence after which a kernel pair is NO_DATA."""
    max_series: int = Field(default=2000, ge=1, strict=True)
    """Most streams kept per contract; the rest is counted as slice `other`."""


_BARE: Final = ("notify", "sample-more", "hold-promotion", "quarantine-rollouts", "halt")
_TARGETED: Final = ("route", "webhook")
_ROUTES: Final = ("train-kernel", "inference-kernel")


class Action(_Model):
    """Something that a step of the ladder does."""

    kind: Literal["notify", "sample-more", "hold-promotion", "quarantine-rollouts", "halt", "route", "webhook"]
    target: str | None = None
    """Kernel for `route`, endpoint for `webhook`."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, Action) or (isinstance(value, dict) and "kind" in value):
            return value
        if isinstance(value, str):
            if value in _TARGETED:
                msg = f"{value!r} needs a target; write {{{value}: {'train-kernel' if value == 'route' else 'NAME'}}}"
                raise ValueError(msg)
            if value not in _BARE:
                msg = f"{value!r} is not an action; write one of {', '.join((*_BARE, *_TARGETED))}"
                raise ValueError(msg)
            return {"kind": value}
        if isinstance(value, dict) and len(value) == 1:
            ((kind, target),) = value.items()
            if kind not in _TARGETED:
                msg = f"{kind!r} is not an action with a target; write route or webhook"
                raise ValueError(msg)
            return {"kind": kind, "target": target}
        msg = f"{value!r} is not an action; write a name such as notify, or {{webhook: NAME}}"
        raise ValueError(msg)

    @model_validator(mode="after")
    def _reachable(self) -> Action:
        if self.kind == "route" and self.target not in _ROUTES:
            msg = f"route: {self.target!r} is not a kernel; write one of {', '.join(_ROUTES)}"
            raise ValueError(msg)
        if self.kind == "webhook" and (not self.target or not re.fullmatch(NAME_PATTERN, self.target)):
            msg = f"webhook: {self.target!r} is not an endpoint's name; write lower-case letters, digits and dashes"
            raise ValueError(msg)
        return self

    def __str__(self) -> str:
        return self.kind if self.target is None else f"{self.kind}:{self.target}"


class Step(_Model):
    """One rung of the escalation ladder."""

    on: Literal["fail", "no-data", "inconclusive", "invalid-input"]
    """Verdict that the step waits for; `invalid-input` for batches that failed an input check."""
    after: Duration = Field(default=0.0, alias="for")
    """How long the verdict must last before the step fires."""
    clear_for: Duration = 0.0
    """How long it must be gone before the step resolves."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """Label of alerts and webhooks."""
    do: tuple[Action, ...] = Field(min_length=1, max_length=20)
    """What happens when the step fires; routes and holds last until it resolves."""
    clauses: tuple[Name, ...] = Field(default=(), max_length=200)
    """Only these clauses; all when empty."""


class Contract(_Model):
    """A kernel contract: numerical, statistical, runtime and observability clauses and an escalation policy."""

    apiVersion: Literal["kernel-contract/v1"]  # noqa: N815 - the YAML's own name
    kind: Literal["KernelContract"]
    metadata: Metadata
    kernels: Kernels
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
    escalation: tuple[Step, ...] = Field(default=(), max_length=50)
    """Pi: what happens on a breach."""

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

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the contract's content; spelling, order of keys and comments do not count. 64 hex digits."""
        content = self.model_dump(mode="json", by_alias=True)
        for section in ("numerical", "statistical", "runtime"):
            content[section] = [_meaning(clause) for clause in getattr(self, section)]
        for name, spec in self.slices.items():
            content["slices"][name]["where"] = {
                attribute: [[condition.comparison, *condition.values] for condition in conditions]
                for attribute, conditions in spec.conditions.items()
            }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def slices_of(self, attributes: Mapping[str, Scalar]) -> tuple[str, ...]:
        """Names of the slices that a sequence with these attributes belongs to, `all` first."""
        return (ALL, *(name for name, spec in self.slices.items() if spec.matches(attributes)))


def _meaning(clause: Clause) -> dict[str, Any]:
    """A clause's content with its limits in the metric's unit and its statistic spelled out."""
    statistic = clause.parsed_statistic
    return {
        **clause.model_dump(mode="json"),
        "statistic": [statistic.kind, statistic.argument],
        "limit": parse_limit(clause.limit, clause.unit),
        "slices": {name: clause.limit_for(name) for name in clause.slices},
    }
