"""Routes that lead back to where they came from, over several contracts that one evaluator serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kc_otel.contract.errors import Loc
from kc_otel.contract.lint import Finding
from kc_otel.contract.model import Contract, KernelSpec

__all__ = ["circles"]


def circles(contracts: Sequence[Contract]) -> Iterator[tuple[int, Finding]]:
    """Index of the contract, and what is wrong, for every route that closes a circle.

    A contract routes from the kernel under `inference` to the one under `train`. Where the routes of others lead from
    there back to the first, a request that all of them are about is sent in circles once all of them fire, and no
    healthy kernel is left for it.
    """
    edges: dict[KernelSpec, list[tuple[KernelSpec, str]]] = {}
    for index, contract in enumerate(contracts):
        loc = _route(contract)
        source, target = contract.kernels.inference, contract.kernels.train
        if loc is None or source == target:  # one without a route, and one that lint refuses by itself
            continue
        names = _way(edges, target, source)
        if names is not None:
            message = (
                f"routes from {_shown(source)} to {_shown(target)}, and {' and '.join(names)} from there back: a "
                "request that they are all about would go in circles; leave one of the routes out"
            )
            yield index, Finding(loc, message)
        edges.setdefault(source, []).append((target, contract.name))


def _route(contract: Contract) -> Loc | None:
    for index, step in enumerate(contract.escalation):
        for position, action in enumerate(step.do):
            if action.kind == "route":
                return "escalation", index, "do", position
    return None


def _way(
    edges: dict[KernelSpec, list[tuple[KernelSpec, str]]], start: KernelSpec, end: KernelSpec
) -> tuple[str, ...] | None:
    """Contracts whose routes lead from one kernel to another, the fewest; None where none do."""
    found: list[tuple[KernelSpec, tuple[str, ...]]] = [(start, ())]
    seen = {start}
    for kernel, names in found:
        if kernel == end:
            return names
        for following, name in edges.get(kernel, ()):
            if following not in seen:
                seen.add(following)
                found.append((following, (*names, name)))
    return None


def _shown(kernel: KernelSpec) -> str:
    return " ".join(part for part in (kernel.engine, kernel.dtype, kernel.quantization) if part)
