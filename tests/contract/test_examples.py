"""The contracts that teams start from."""

import re
from pathlib import Path

import pytest

from kc_otel.contract.lint import lint
from kc_otel.contract.load import load, load_all

_FOLDER = Path(__file__).parents[2] / "contracts"
_CONTRACTS = sorted(_FOLDER.glob("*.yaml"))
_WANTED = {
    "rl-rollouts-bf16-fp8", "serving-int8", "serving-awq", "attention-kernel-upgrade", "moe", "batch-invariance",
    "fp8-kv-cache",
}  # fmt: skip


def test_there_is_one_for_each_need():
    assert {contract.name for contract in load_all([_FOLDER])} >= _WANTED
    assert all(load(path).name == path.stem for path in _CONTRACTS)


@pytest.mark.parametrize("path", _CONTRACTS, ids=lambda path: path.stem)
def test_it_is_sound_without_a_warning(path):
    assert lint(load(path)) == []


@pytest.mark.parametrize("path", _CONTRACTS, ids=lambda path: path.stem)
def test_figures_have_a_source(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"arXiv:\d{4}\.\d{5}|\b20\d\d \(\"|README\.md|docs/", text)
