"""Kernel versions: the program that evaluated the policy, in full, and as a short fingerprint for a metric."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kc_otel.contract.model import OTHERWISE_REMEDY, KernelSpec, declared_otherwise
from kc_otel.contract.slices import Scalar

_FINGERPRINT_DIGITS: Final = 12
_PREFIX: Final = "kc.kernel."
_EXTRA_PREFIX: Final = f"{_PREFIX}extra."
_FIELDS: Final = (
    "engine", "version", "dtype", "quantization", "kv_cache_dtype", "attention", "parallelism", "compile", "hardware",
)  # fmt: skip
_ATTRIBUTES: Final = {name: _PREFIX + name for name in _FIELDS} | {"version": f"{_PREFIX}engine.version"}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One version of a kernel: everything that may change the numbers it computes, apart from the weights.

    Two kernels are equal when their fields are. A dtype may be given as a `torch.dtype`; any other value that is not
    text, a number or a boolean is converted to text.

    >>> Kernel("vllm", version="0.32.0", dtype="bfloat16", kv_cache_dtype="fp8").fingerprint
    '9226f24e3b5f'

    Attributes:
        engine: Program that evaluates the policy, such as torch, vllm, sglang.
        version: Version of that program.
        dtype: Number format of weights and activations.
        quantization: Quantisation method, such as awq, gptq, compressed-tensors.
        kv_cache_dtype: Number format of the KV cache.
        attention: Attention backend, such as FLASH_ATTN, TRITON_ATTN.
        parallelism: How the model is split, such as tp=2,pp=1.
        compile: Compilation mode or flags.
        hardware: Device it runs on, such as H100.
        extra: Anything else that changes the numbers.
        fingerprint: First 12 hex digits of the SHA-256 of the canonical JSON of the fields that are set.
    """

    engine: str
    _: KW_ONLY
    version: Any = None
    dtype: Any = None
    quantization: Any = None
    kv_cache_dtype: Any = None
    attention: Any = None
    parallelism: Any = None
    compile: Any = None
    hardware: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str) or not self.engine:
            raise ValueError(f"engine: {self.engine!r} is not a program's name; write torch, vllm, sglang ...")
        for name in _ATTRIBUTES:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        extra = {str(key): plain for key, value in self.extra.items() if (plain := _plain(value)) is not None}
        object.__setattr__(self, "extra", MappingProxyType(extra))
        canonical = json.dumps(self.to_plain(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        object.__setattr__(self, "fingerprint", digest[:_FINGERPRINT_DIGITS])

    @classmethod
    def declared(cls, spec: KernelSpec) -> Kernel:
        """The kernel as a contract declares it, for programs that cannot say more about it."""
        return cls(**spec.model_dump())

    @classmethod
    def reported(cls, fields: Mapping[str, str]) -> Kernel:
        """The kernel whose `attributes` these are, their names without `kc.kernel.`.

        Raises:
            ValueError: If no engine is among them.
        """
        extra = {name.removeprefix("extra."): text for name, text in fields.items() if name.startswith("extra.")}
        known = {name: fields.get(attribute.removeprefix(_PREFIX)) for name, attribute in _ATTRIBUTES.items()}
        return cls(known.pop("engine") or "", **known, extra=extra)

    def fields(self) -> dict[str, str]:
        """Its `attributes` as text, their names without `kc.kernel.`."""
        return {name.removeprefix(_PREFIX): str(value) for name, value in self.attributes().items()}

    def to_plain(self) -> dict[str, Any]:
        """The fields that are set, as a JSON object; `Kernel(**plain)` is the kernel again, or a TypeError."""
        fields = {name: value for name in _ATTRIBUTES if (value := getattr(self, name)) is not None}
        return {**fields, "extra": dict(self.extra)} if self.extra else fields

    def attributes(self) -> dict[str, Scalar]:
        """The fields that are set, by the names they have on the metric `kc.kernel.info`."""
        named = {_ATTRIBUTES[name]: value for name, value in self.to_plain().items() if name != "extra"}
        return {**named, **{_EXTRA_PREFIX + key: value for key, value in self.extra.items()}}

    def log_otherwise(self, contract: str, spec: KernelSpec, log: logging.Logger) -> None:
        """Log the differences from the contract's declaration; the measurements are still judged."""
        if found := declared_otherwise(spec, self.fields()):
            said = f"kernel {self.fingerprint} is not what contract {contract} declares: {'; '.join(found)}"
            log.warning("kc-otel: %s; %s", said, OTHERWISE_REMEDY)

    def __eq__(self, other: object) -> bool:
        return self.to_plain() == other.to_plain() if isinstance(other, Kernel) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)


@dataclass(frozen=True, slots=True)
class KernelPair:
    """The two kernel versions that a stream compares."""

    train: Kernel
    inference: Kernel


def parallelism_of(given: Any, **sizes: str) -> str:
    """Split of a model, such as `tp=2,pp=4`, by attributes of a configuration; empty where it is not."""
    return ",".join(
        f"{short}={size}" for short, name in sizes.items() if (size := getattr(given, name, 1)) not in (None, 1)
    )


def _plain(value: object) -> Scalar | None:
    if value is None or value == "":
        return None
    if isinstance(value, str | bool | int | float):
        return value
    # str(torch.bfloat16) is "torch.bfloat16", and must not be another kernel than "bfloat16".
    return str(value).removeprefix("torch.")
