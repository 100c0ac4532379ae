"""Kernels that reported themselves, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.declared_kernels import declared_apart, declared_otherwise
from kc_otel.contract.model import KernelSpecs
from kc_otel.contract.slices import Scalar

_PREFIX: Final = "kc.kernel."
_MAX_KERNELS: Final = 256
_MAX_FIELDS: Final = 32
_MAX_CHARACTERS: Final = 200
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
