"""The contract C = (N, S, R, O, Pi) as frozen data. The comments on the fields are the documentation of the YAML.

Checks of a single field are here; checks across fields (duplicate ids, undeclared slices, limits that contradict the
assumptions) are in `lint.py`. `load.py` gives every error its file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, Literal

from pydantic import Field, field_validator

from kc_otel.contract.clause import Clause
from kc_otel.contract.fields import Duration, Name, Number, Strict
from kc_otel.contract.policy import EscalationStep, PromotionTerms
from kc_otel.contract.registry.clause_metrics import AVERAGED, DERIVED, OPERATORS, QUANTITIES, SAMPLING, Origin, Unit
from kc_otel.contract.slices import ALL, LAG, OF_TOKENS, UNJUDGED, Scalar, SliceCondition, match, parse_condition
from kc_otel.contract.units import parse_limit


class Metadata(Strict):
    """Name, version and owner of the contract."""

    name: Name
    """Name of the contract; it is an attribute of every metric, so keep it short and stable."""
    version: int = Field(ge=1, strict=True)
    """Increase it with every change; every verdict and webhook carries it."""
    owner: str = Field(min_length=1, max_length=200)
    """Responsible team or person."""
    description: str = Field(default="", max_length=2000)
    """One sentence for the person who is paged."""
    runbook: str | None = None
    """Link that alerts carry."""


class KernelSpec(Strict):
    """Expected properties of a kernel; the fingerprint of a version has the actual ones."""

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
    """The pair of kernels that the contract is about."""

    train: KernelSpec
    """P: the kernel that computes gradients, or the reference in serving."""
    inference: KernelSpec
    """Q: the kernel that samples."""


class Assumptions(Strict):
    """Constants that bounds on reward and gradient need. Measurements that contradict them prevent a PASS."""

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
    density: bool = Field(default=False, strict=True)
    """Log-probabilities are log-densities, of continuous actions or diffusion steps, which may exceed 0."""

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
    """Attribute to value, list of values, or comparison (`">= 8192"`). All conditions must hold."""
    description: str = Field(default="", max_length=500)
    """One sentence for readers of the contract."""

    @field_validator("where")
    @classmethod
    def _parses(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, raw in value.items():
            try:
                parse_condition(raw)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return value

    @cached_property
    def conditions(self) -> Mapping[str, tuple[SliceCondition, ...]]:
        """The parsed conditions, by attribute."""
        return {name: parse_condition(raw) for name, raw in self.where.items()}

    @property
    def meaning(self) -> dict[str, Any]:
        """The conditions, spelled out: comparisons and their values by attribute."""
        return {
            attribute: [[condition.comparison, *condition.values] for condition in conditions]
            for attribute, conditions in self.conditions.items()
        }

    @property
    def of_tokens(self) -> bool:
        """Return whether it selects tokens of a sequence, by their position or turn."""
        return not OF_TOKENS.isdisjoint(self.where)

    def matches(self, attributes: Mapping[str, Scalar]) -> bool:
        """Return True if a sequence with these attributes belongs to the slice as a whole."""
        return match(self.conditions, attributes)


class Observability(Strict):
    """Share of traffic that is measured, the windows, and the confidence of verdicts."""

    window: Duration = 300.0
    """Rolling window whose observations decide a PASS."""
    long_window: Duration = 3600.0
    """Rolling window that decides when the short one cannot."""
    confidence: Number = Field(default=0.99, gt=0.5, lt=1.0)
    """Minimum probability, at one evaluation and for one cell, that a window's interval contains the true value, and
    that a PASS is right."""
    false_alarms: Duration = 30 * 86400.0
    """Minimum expected time between false alarms (FAILs of cells that are within their limits), for all cells of the
    contract together."""
    min_samples: int = Field(default=2000, ge=1, strict=True)
    """Fewest tokens, rows of an operator's output, or observations of a `gen_ai.*` histogram for a PASS, and for a FAIL
    by an interval, as in a gate. A FAIL by evidence does not depend on it."""
    # Intervals are valid at any size; the minimum guards what they assume, that a window is more than one burst of
    # alike requests. 100 sequences is where gross drift can be told: even where a quantity in [0, 1] was 0 in all of
    # them, no interval of confidence 0.99 excludes a mean of 0.052 = 1 - 0.005^(1/100), half of alpha being each
    # window's; at 1000 sequences it is 0.0053. Asking for 2000, as of tokens, would leave small slices without a
    # verdict that they are able to give.
    min_sequences: int = Field(default=100, ge=1, strict=True)
    """Fewest prompts or sequences for a PASS of a cell that is judged by them, and for a FAIL by an interval."""
    sampling: Number = Field(default=1.0, gt=0.0, le=1.0)
    """Share of batches that the recorder measures."""
    heartbeat: Duration = 60.0
    """Time without a report, after one was due, from which a kernel pair is NO_DATA."""
    max_series: int = Field(default=2000, ge=1, strict=True)
    """Largest number of series per contract; slices without room count as `other`."""

    @property
    def late(self) -> float:
        """Seconds after a rollback within which what a version had answered before is measured."""
        return max(self.heartbeat, self.window)

    def minimum(self, clause: Clause) -> tuple[str, int]:
        """Name and value of the minimum that a mean, quantile or fraction is subject to."""
        if clause.quantity is not None and clause.quantity.per in {Unit.SEQUENCE, Unit.PROMPT}:
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
    """Parts of the traffic that are judged on their own; they may overlap. The slice `all` always exists."""
    numerical: tuple[Clause, ...] = Field(default=(), max_length=200)
    """N: limits on the operators' effect on the logits."""
    statistical: tuple[Clause, ...] = Field(default=(), max_length=200)
    """S: limits on the distributions, rewards and gradients."""
    runtime: tuple[Clause, ...] = Field(default=(), max_length=200)
    """R: limits on freshness and latency."""
    observability: Observability = Observability()
    """O: measured share of traffic, windows and confidence."""
    escalation: tuple[EscalationStep, ...] = Field(default=(), max_length=50)
    """Pi: actions on a breach."""
    promotion: PromotionTerms = PromotionTerms()
    """Requirements for a kernel version to serve more traffic."""

    @field_validator("slices")
    @classmethod
    def _not_reserved(cls, value: dict[str, SliceSpec]) -> dict[str, SliceSpec]:
        for name in (ALL, *sorted(UNJUDGED)):
            if name in value:
                raise ValueError(f"{name!r} is reserved; choose another name")
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
    def averaged(self) -> tuple[str, ...]:
        """Keys of the means over sequences, prompts or steps that some clause is judged by, in the registry's order."""
        judged = [quantity for clause in self.clauses for quantity in (clause.quantity, clause.opposite)]
        asked = {quantity.key for quantity in judged if quantity is not None}
        return tuple(quantity.key for quantity in AVERAGED.values() if quantity.key in asked)

    @property
    def streams_per_slice(self) -> int:
        """Streams that one kernel pair needs for each slice, by which `max_series` says how many slices have room."""
        each_operator = len(OPERATORS)
        others = len(QUANTITIES) - each_operator + len(SAMPLING) + len(self.averaged)
        return others + each_operator * len(self.operators)

    @property
    def recorded(self) -> frozenset[str]:
        """Keys of the quantities that recorders export, apart from those of operators; all of them without a clause.

        Else those that clauses are computed from; tv_token, whose count says how much was measured and whose exemplars
        name the worst tokens; the ratio, whose mean shows whether tokens were sampled by the inference kernel; and what
        a program observes by itself: a kernel is not to blame for stale weights.
        """
        if not self.clauses:
            return frozenset(QUANTITIES)
        asked = {
            quantity.key
            for clause in self.clauses
            for quantity in (clause.quantity, clause.opposite)
            if quantity is not None
        }
        runtime = {key for key, quantity in QUANTITIES.items() if quantity.source is Origin.RUNTIME}
        return frozenset(asked | runtime | {"tv_token", "ratio"})

    def acts_on(self, clause: Clause) -> tuple[str, ...]:
        """Return the consumers of a clause's verdicts: actions, critical alerts, and promotion if it has terms."""
        found = [what for step in self.escalation for what in step.acts_on(clause.id)]
        return tuple(dict.fromkeys([*found, *(["promotion"] if "promotion" in self.model_fields_set else [])]))

    def tail_of(self, clause: Clause) -> Clause | None:
        """Return the clause that limits the values above another clause's cap, if there is one."""
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
        for section in ("numerical", "statistical", "runtime"):
            content[section] = [_meaning(clause) for clause in getattr(self, section)]
        for name, spec in self.slices.items():
            content["slices"][name]["where"] = spec.meaning
        return _digest(content)

    @cached_property
    def slice_digests(self) -> Mapping[str, str]:
        """Eight hex digits of each slice's conditions, by its name; spelling and order do not count."""
        return {name: _digest(spec.meaning)[:8] for name, spec in self.slices.items()}

    @cached_property
    def quantity_digests(self) -> Mapping[tuple[str, str], str]:
        """Twelve hex digits of what each clause measures on each of its slices: all that defines it but its limit."""
        found = {}
        for clause in self.clauses:
            meaning, derived = _meaning(clause), DERIVED.get(clause.metric)
            content = {name: meaning[name] for name in ("metric", "operator", "statistic", "unit", "cap")}
            content |= {name: getattr(self.assumptions, name) for name in (derived.needs if derived else ())}
            for slice in self.slices_for(clause):
                found[clause.id, slice] = _digest({**content, "slice": self.slice_digests.get(slice, "")})[:12]
        return found

    @cached_property
    def recorded_digests(self) -> Mapping[str, str]:
        """Eight hex digits of what recorders measure for each clause: neither its limits nor its slices."""
        recorded = (clause.id for clause in self.clauses if clause.quantity is not None)
        return {id: self.quantity_digests[id, ALL][:8] for id in recorded}

    @cached_property
    def slice_ids(self) -> Mapping[str, str]:
        """Eight hex digits of each slice's name and conditions: two contracts that share them mean the same slice."""
        return {name: _digest({name: digest})[:8] for name, digest in self.slice_digests.items()}

    def slices_for(self, clause: Clause) -> tuple[str, ...]:
        """Return the slices that a clause is judged on, `all` first.

        Slices of tokens are only for a clause on tokens, and slices by lag for no clause on the lag itself.
        """
        of_tokens = clause.quantity is not None and clause.quantity.source not in {Origin.OPERATORS, Origin.RUNTIME}
        of_lag = clause.metric == "weights_lag"
        left_out = {
            name
            for name, spec in self.slices.items()
            if (spec.of_tokens and not of_tokens) or (of_lag and LAG in spec.conditions)
        }
        return (ALL, *(name for name in self.slices if name not in left_out))

    def slices_of(self, attributes: Mapping[str, Scalar]) -> tuple[str, ...]:
        """Names of the slices that a sequence with these attributes belongs to as a whole, `all` first."""
        return (ALL, *(name for name, spec in self.slices.items() if spec.matches(attributes)))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _meaning(clause: Clause) -> dict[str, Any]:
    """A clause's content with its limits in the metric's unit, its statistic and its unit spelled out."""
    statistic, quantity = clause.parsed_statistic, clause.quantity
    return {
        **clause.model_dump(mode="json"),
        "statistic": [statistic.kind, statistic.argument],
        "unit": quantity and str(quantity.per),
        "limit": parse_limit(clause.limit, clause.limit_unit),
        "slices": {name: clause.limit_for(name) for name in clause.slices},
    }


OTHERWISE_REMEDY: Final = "start the engine as the contract declares it, or correct the contract"

NUMBER_FORMATS: Final = ("dtype", "quantization", "kv_cache_dtype")
_DECLARED: Final = ("engine", "attention", *NUMBER_FORMATS)


def declared_otherwise(spec: KernelSpec, fields: Mapping[str, str]) -> tuple[str, ...]:
    """Return the fields a kernel reports differently than its contract declares; unreported fields are ignored.

    The configuration of vLLM itself, which has the compilation and the cache, names a quantisation where there is one.

    >>> declared_otherwise(KernelSpec(engine="vllm", kv_cache_dtype="fp8"), {"kv_cache_dtype": "auto"})
    ('kv_cache_dtype fp8 is declared, and auto reported',)
    >>> declared_otherwise(KernelSpec(engine="vllm", kv_cache_dtype="bfloat16"), {"kv_cache_dtype": "auto"})
    ()
    >>> declared_otherwise(KernelSpec(engine="vllm", kv_cache_dtype="turboquant_k8v4"), {"kv_cache_dtype": "auto"})
    ('kv_cache_dtype turboquant_k8v4 is declared, and auto reported',)
    """
    found = []
    for name in _DECLARED:
        declared, reported = getattr(spec, name), fields.get(name)
        if name == "quantization" and fields.get("engine") == "vllm" and fields.keys() >= {"compile", "kv_cache_dtype"}:
            reported = reported or "none"
        if declared is None or reported is None or _same(declared, reported):
            continue
        if name == "kv_cache_dtype" and not _caches_differ(declared, reported, fields.get("dtype")):
            continue
        # Quantised kernels compute in another format than that of their stored weights.
        if name == "dtype" and _same(declared, fields.get("quantization", "")):
            continue
        found.append(f"{name} {declared} is declared, and {reported} reported")
    return tuple(found)


def declared_apart(specs: Any, fields: tuple[str, ...] = _DECLARED) -> bool:
    """Return whether the declarations of a pair of kernels exclude each other; a field left open excludes nothing.

    `specs` has `train` and `inference`, a contract's or a recorder's.

    >>> from functools import partial
    >>> bf16 = partial(KernelSpec, engine="vllm", dtype="bf16")
    >>> [declared_apart(KernelSpecs(train=bf16(kv_cache_dtype="auto"), inference=bf16(kv_cache_dtype=other)))
    ...  for other in ("bfloat16", "fp8")]
    [False, True]
    """
    for name in fields:
        train, inference = getattr(specs.train, name), getattr(specs.inference, name)
        if train is None or inference is None or _same(train, inference) or _same(inference, train):
            continue
        if name != "kv_cache_dtype" or _caches_differ(train, inference, specs.train.dtype or specs.inference.dtype):
            return True
    return False


def cache_may_be_the_checkpoints(spec: KernelSpec) -> bool:
    """Return True if vLLM's `auto` may be another format than the model's: llm-compressor's checkpoints name one."""
    return _plain(spec.quantization or "").startswith("compressed_tensors")


def _caches_differ(ours: str, theirs: str, dtype: str | None) -> bool:
    """Return whether two formats of a cache are known to differ; `auto` is that of a model that computes in `dtype`."""
    formats = [_cache(name, dtype) for name in (ours, theirs)]
    if None in formats:  # a model's own, which is none that a cache alone is kept in
        return not {*formats} <= {None, *_SHORT_DTYPES.values()}
    return formats[0] != formats[1]


def _cache(name: str, dtype: str | None) -> str | None:
    plain = dtype or "" if name == "auto" else name
    known = _SHORT_DTYPES.get(_plain(plain), _plain(plain))
    return "fp8_e4m3" if known == "fp8" else known or None  # vLLM's fp8


def _same(declared: str, reported: str) -> bool:
    ours, theirs = (_SHORT_DTYPES.get(name, name) for name in (_plain(declared), _plain(reported)))
    return theirs.removeprefix("auto_").startswith(ours.removeprefix("auto_"))  # vLLM: auto_awq, auto_gptq


_SHORT_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _plain(name: str) -> str:
    return name.lower().removeprefix("torch.").replace("-", "_")
