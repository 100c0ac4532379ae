"""Facts stored beside the numbers: kernels that reported themselves, their names, and the worst batches as examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.contract.declared_kernels import declared_apart, declared_otherwise
from kc_otel.contract.model import KernelSpecs
from kc_otel.contract.plain_text import plain
from kc_otel.contract.slices import Scalar

COMPARE: Final = "kc.compare"
_WORST_LOG_RATIO: Final = "kc.compare.worst.abs_log_ratio"
_PREFIX: Final = "kc.kernel."
_MAX_KERNELS: Final = 256
_MAX_EXAMPLES: Final = 20
_MAX_FIELDS: Final = 32
_MAX_CHARACTERS: Final = 200
_MAX_ATTRIBUTES: Final = 128
"""Of a span; OpenTelemetry's SDKs send as many."""
_NAMING_FIELDS: Final = ("engine", "engine.version", "dtype", "quantization")
ONE_KERNEL: Final = "two kernels are declared, but both sides report the same one"
_IDENTITY_ATTRIBUTES: Final = frozenset({"kc.contract", "kc.kernel.role", "kc.kernel.version"})


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A kernel version in a role, `train` or `inference`, and the fields that its fingerprint is made of."""

    role: str
    version: str
    fields: dict[str, str]
    last_seen: float


@dataclass(frozen=True, slots=True)
class WorstBatch:
    """A measured batch with a large log ratio in it."""

    at: float
    """Unix time of the batch's end, seconds."""
    trace_id: str
    span_id: str
    worst: float
    """Largest |l| of the batch, nats."""
    links: tuple[tuple[str, str], ...]
    """(trace id, span id), hex, of the requests or steps that it compares."""
    attributes: dict[str, Scalar | list[Scalar]]


class KernelVersions:
    """Kernel versions of one contract, at most _MAX_KERNELS: the ones seen last."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], KernelInfo] = {}

    def see(self, attributes: dict[str, Scalar], now: float) -> bool:
        """Take the attributes of a kc.kernel.info point. Returns whether they name a kernel."""
        role, version = attributes.get("kc.kernel.role"), attributes.get("kc.kernel.version")
        if not (isinstance(role, str) and isinstance(version, str) and role and version):
            return False
        given = [(name, value) for name, value in attributes.items() if name not in _IDENTITY_ATTRIBUTES][:_MAX_FIELDS]
        fields = {name.removeprefix(_PREFIX)[:_MAX_CHARACTERS]: str(value)[:_MAX_CHARACTERS] for name, value in given}
        key = (role[:_MAX_CHARACTERS], version[:_MAX_CHARACTERS])
        self.know(KernelInfo(*key, fields, now))
        return True

    def know(self, info: KernelInfo) -> None:
        """Keep a version, and as many others as there is room for."""
        self.known[info.role, info.version] = info
        if len(self.known) > _MAX_KERNELS:
            del self.known[min(self.known, key=lambda name: self.known[name].last_seen)]


class WorstBatches:
    """The worst batches of one contract within the long window, at most _MAX_EXAMPLES, worst first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.kept: list[WorstBatch] = []

    def offer(self, example: WorstBatch, now: float) -> None:
        """Keep an example if it is among the worst."""
        fresh = [kept for kept in self.recent(now) if kept.span_id != example.span_id]
        fresh.append(example)
        fresh.sort(key=lambda kept: -kept.worst)
        self.kept = fresh[:_MAX_EXAMPLES]

    def recent(self, now: float) -> list[WorstBatch]:
        """The kept ones that are not too old."""
        return [example for example in self.kept if example.at > now - self._seconds]


def examples_in(request: Any) -> list[tuple[str, WorstBatch]]:
    """(contract, example) of every kc.compare span in an ExportTraceServiceRequest that names both."""
    found = []
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if span.name != COMPARE:
                    continue
                attributes = _attributes(span)
                contract, worst = attributes.get("kc.contract"), attributes.get(_WORST_LOG_RATIO)
                if not isinstance(contract, str):
                    continue
                if isinstance(worst, int | float) and worst == worst:  # noqa: PLR0124 - nan
                    example = WorstBatch(
                        at=span.end_time_unix_nano / 1e9,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        worst=float(worst),
                        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links[:8]),
                        attributes=attributes,
                    )
                    found.append((contract, example))
    return found


def _attributes(span: Any) -> dict[str, Scalar | list[Scalar]]:
    """Return a span's own attributes that are short enough."""
    short = (pair for pair in span.attributes[:_MAX_ATTRIBUTES] if len(pair.key) <= _MAX_CHARACTERS)
    return {pair.key: value for pair in short if (value := _value(pair.value)) is not None}


def _value(value: Any) -> Scalar | list[Scalar] | None:
    field = value.WhichOneof("value")
    if field == "string_value":
        return plain(str(value.string_value)[:_MAX_CHARACTERS])
    if field in {"int_value", "double_value", "bool_value"}:
        scalar: Scalar = getattr(value, field)
        return str(scalar) if isinstance(scalar, float) and not math.isfinite(scalar) else scalar  # JSON has no number
    if field == "array_value":
        items = [_value(item) for item in value.array_value.values[:_MAX_FIELDS]]
        return [item for item in items if item is not None and not isinstance(item, list)]
    return None


def kernel_name(fields: Mapping[str, str], version: str, others: Iterable[Mapping[str, str]] = ()) -> str:
    """A kernel as people call it, its fingerprint after it, and what tells it from `others` that are called alike.

    >>> cache = {"engine": "vllm", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    >>> kernel_name(cache, "6cc3fbbbec48", [cache | {"kv_cache_dtype": "auto"}])
    'vllm bfloat16, kv_cache_dtype fp8 (6cc3fbbbec48)'
    """
    own = [fields.get(name) for name in _NAMING_FIELDS]
    said = " ".join(filter(None, own))
    if not said:
        return version
    alike = [other for other in others if [other.get(name) for name in _NAMING_FIELDS] == own]
    names = sorted({name for kernel in alike for name in {*kernel, *fields} if kernel.get(name) != fields.get(name)})
    parts = [said, *(f"{name} {fields.get(name, 'not reported')}" for name in names)]
    return f"{', '.join(parts)} ({version})"


def kernel_names(kernels: Iterable[KernelInfo]) -> dict[tuple[str, str], str]:
    """The names of a contract's kernels, by role and version."""
    known = list(kernels)
    return {
        (kernel.role, kernel.version): kernel_name(
            kernel.fields, kernel.version, [other.fields for other in known if other.version != kernel.version]
        )
        for kernel in known
    }


def pair_name(names: Mapping[tuple[str, str], str], train: str, inference: str) -> str:
    """The two kernels of a pair, by their `kernel_names`, as the end of a sentence; empty where none has reported.

    >>> pair_name({("inference", "6cc3fbbbec48"): "vllm fp8 (6cc3fbbbec48)"}, "9cb1f0c2a7d4", "6cc3fbbbec48")
    ' for vllm fp8 (6cc3fbbbec48) against 9cb1f0c2a7d4'
    """
    ours, theirs = names.get(("inference", inference), inference), names.get(("train", train), train)
    return (f" for {ours}" if ours else "") + (f" against {theirs}" if theirs else "")


def unlike_declared(specs: KernelSpecs, kernel: KernelInfo, known: Iterable[KernelInfo]) -> tuple[str, ...]:
    """List how a kernel differs from its declaration: by a field, or by being the other side's kernel."""
    found = declared_otherwise(specs.train if kernel.role == "train" else specs.inference, kernel.fields)
    twice = {other.role for other in known if other.version == kernel.version} >= {"train", "inference"}
    return (*found, ONE_KERNEL) if twice and declared_apart(specs) else found


def stand_in(known: Iterable[KernelInfo]) -> frozenset[str]:
    """Versions that train, and serve beside others: slices are routed to the training kernel, and measured there."""
    of_role = {role: {kernel.version for kernel in known if kernel.role == role} for role in ("train", "inference")}
    both = of_role["train"] & of_role["inference"]
    return frozenset(both if of_role["inference"] > both else ())
