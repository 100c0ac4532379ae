"""Display names of kernels, and the kernels that differ from their contract's declaration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kc_otel.contract.declared_kernels import declared_apart, declared_otherwise
from kc_otel.contract.model import KernelSpecs
from kc_otel.judge.facts import KernelInfo

_NAMING_FIELDS: Final = ("engine", "engine.version", "dtype", "quantization")

ONE_KERNEL: Final = "two kernels are declared, but both sides report the same one"


def kernel_name(fields: Mapping[str, str], version: str, others: Iterable[Mapping[str, str]] = ()) -> str:
    """A kernel as people call it, its fingerprint after it.

    Args:
        fields: Fields of its fingerprint.
        version: The fingerprint.
        others: Fields of other kernels: of those that would be called alike, what is not alike is named too.

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
