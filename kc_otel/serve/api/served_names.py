"""Names in a request that nothing here has: an answer that says which there are, and never an empty list."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Query

from kc_otel.contract.model import Contract
from kc_otel.serve.core import Core

__all__ = ["ContractName", "served", "served_or_all"]

ContractName = Annotated[str | None, Query(description="Only this contract.")]


def served(core: Core, contract: str) -> Contract:
    """The contract; an answer with status 404 that names what there is when it is not served."""
    found = core.contracts.get(contract)
    if found is None:
        raise HTTPException(404, f"no contract {contract!r}; there are {', '.join(core.contracts)}")
    return found


def served_or_all(core: Core, contract: str | None) -> None:
    """Nothing for None and for a contract that is served: of one that is not, nothing would look like no trouble."""
    if contract is not None:
        served(core, contract)
