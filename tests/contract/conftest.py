from collections.abc import Callable

import pytest

from kc_otel.contract.load import check_text
from kc_otel.contract.model import Contract

_HEAD = (
    "apiVersion: kernel-contract/v1",
    "kind: KernelContract",
    "metadata: {name: policy-7b, version: 3, owner: rl-infra}",
    "kernels: {train: {engine: torch, dtype: bfloat16}, inference: {engine: vllm, dtype: fp8}}",
)
_CLAUSE = "statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.004}]"


def clause(section: str = "numerical", **fields: object) -> str:
    """A line of YAML with a section of one clause."""
    written = ", ".join(f"{name}: {value}" for name, value in {"id": "x", "limit": 0.1, **fields}.items())
    return f"{section}: [{{{written}}}]"


def _written(*lines: str, clause: bool = True) -> str:
    return "\n".join((*_HEAD, *lines, *((_CLAUSE,) if clause else ()), ""))


def _said(text: str) -> list[str]:
    return [str(problem) for problem in check_text(text, "c.yaml").problems]


@pytest.fixture(scope="session")
def written() -> Callable[..., str]:
    """YAML of a sound contract with more lines after its first four; the first of these is line 5."""
    return _written


@pytest.fixture(scope="session")
def said() -> Callable[[str], list[str]]:
    return _said


@pytest.fixture(scope="session")
def contract() -> Callable[..., Contract]:
    def load(*lines: str, clause: bool = True) -> Contract:
        result = check_text(_written(*lines, clause=clause), "c.yaml")
        assert result.contract is not None, result.problems
        return result.contract

    return load
