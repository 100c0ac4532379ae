"""Small contracts, of which a test names what it is about."""

from typing import Any

from kc_otel.contract.model import Contract

__all__ = ["contract_of", "contract_text"]


def contract_of(name: str = "policy", version: int = 1, **parts: Any) -> Contract:
    """Return a contract between torch and vLLM; keyword arguments are its sections, or replace them."""
    return Contract.model_validate(
        {
            "apiVersion": "kernel-contract/v1",
            "kind": "KernelContract",
            "metadata": {"name": name, "version": version, "owner": "tests"},
            "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
            **parts,
        }
    )


def contract_text(name: str = "policy", **parts: Any) -> str:
    return contract_of(name, **parts).model_dump_json(by_alias=True)
