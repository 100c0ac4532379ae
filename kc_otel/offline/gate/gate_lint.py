"""Promotion gates that can never open, at the line of the limit that keeps them shut."""

from __future__ import annotations

from collections.abc import Iterator

from kc_otel.contract.errors import LintFinding
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL


def shut_gates(contract: Contract) -> Iterator[LintFinding]:
    """A finding for every limit that nothing can PASS where promotions depend on it; elsewhere it is a choice."""
    holds = any(action.kind == "hold-promotion" for step in contract.escalation for action in step.do)
    if "promotion" not in contract.model_fields_set and not holds:
        return
    from kc_otel.judge.sample_sizes import observations_to_pass  # noqa: PLC0415 - SciPy

    known: dict[tuple[str, float], bool] = {}
    for section in ("numerical", "statistical", "runtime"):
        for index, clause in enumerate(getattr(contract, section)):
            for slice in (ALL, *clause.slices):
                limit = clause.limit_for(slice)
                key = (clause.id, limit)
                if key in known:
                    continue
                known[key] = observations_to_pass(contract, clause, slice).observations is not None
                if not known[key]:
                    where = (section, index, "limit") if slice == ALL else (section, index, "slices", slice)
                    yield LintFinding(
                        where,
                        f"{limit:g} keeps every promotion gate shut: even for identical kernels, no number of "
                        f"observations shows that {clause.id} is kept at confidence "
                        f"{contract.observability.confidence:g}; write a larger limit",
                    )
