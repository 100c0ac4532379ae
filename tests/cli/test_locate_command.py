"""`kc-otel locate run`: from two kernels and a failing slice to a layer, module and share, or to the reason why not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from kc_otel.cli import locate_command
from kc_otel.diagnose.above_noise import boundary_drift
from kc_otel.diagnose.boundaries import Boundary
from tests.diagnose.test_above_noise import located, measured


@pytest.mark.slow
def test_the_culprit_has_a_layer_a_tensor_and_a_share(locate):
    code, out, _ = locate("--slice", "code")
    assert code == 1
    assert "culprit: layer 2, o_proj, module layers.2.o_proj" in out
    assert "tensor layers.2.o_proj.weight differs by" in out
    assert "100 % [100, 100] of tv_token on code comes from o_proj in layer 2" in out
    assert "slice code: 8 sequences" in out


@pytest.mark.slow
def test_evidence_is_json(locate):
    found = json.loads(locate("--json", "--clause", "tail")[1])
    assert found["culprit"]["boundary"] == {"layer": 2, "operator": "o_proj", "part": 0}
    assert found["metric"] == "tokens with |log ratio| above 0.01"
    assert [row["boundary"]["operator"] for row in found["boundaries"] if row["is_above"]] == ["o_proj"]


@pytest.mark.slow
def test_equal_kernels_have_no_culprit(locate):
    code, out, _ = locate(infer="same")
    assert (code, "no culprit: no boundary is above noise" in out) == (0, True)


def test_the_undecided_has_an_exit_code_of_its_own(locate, monkeypatch):
    """3: too few sequences to tell are neither a culprit nor none."""
    family = {Boundary(i, "kv_cache"): measured(np.full(4, 0.0 if i else 13.0)) for i in range(360)}
    monkeypatch.setattr(locate_command, "_of_kernels", lambda *_, **__: located(boundary_drift(family, 0.005)))
    code, out, _ = locate()
    assert (code, "undecided: layer 0, kv_cache differs by" in out) == (3, True)


def test_an_operator_that_no_sequence_reached_is_no_all_clear(locate, monkeypatch):
    clean = located(boundary_drift({Boundary(0, "o_proj"): measured(np.zeros(12))}, 0.005))
    answer = replace(clean, unreached=(Boundary(0, "k_proj"),))
    monkeypatch.setattr(locate_command, "_of_kernels", lambda *_, **__: answer)
    code, out, _ = locate()
    assert (code, "no sequence reached these operators of both kernels: k_proj in layer 0" in out) == (3, True)


@pytest.mark.parametrize(
    ("options", "infer", "said"),
    [
        ((), "other", "have nothing to do with each other"),
        ((), "shallow", "the training kernel has 4 layers and the inference kernel 3"),
        ((), "number", "kernels.py:number: is int, not a torch module"),
        ((), "absent", "kernels.py: has no 'absent'"),
        (("--slice", "tables"), "infer", "'tables' is not a slice of the contract; there are all, code, prose"),
        (("--clause", "x"), "infer", "'x' is not in the contract; there are token-tv, tail"),
        (("--precision", "fp17"), "infer", "'fp17' is no number format of torch"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(locate, options, infer, said):
    code, _, err = locate(*options, infer=infer)
    assert (code, said in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"token_ids": [1, -2]}', "code.jsonl:1: token_ids: is no list of whole numbers from 0"),
        ('{"token_ids": [1, 9999]}', "sequence 0: token 9999 is beyond the vocabulary of 128"),
    ],
)
def test_sequences_that_cannot_be_used_are_refused(locate, tmp_path, line, said):
    (tmp_path / "code.jsonl").write_text(f"{line}\n" * 8)
    code, _, err = locate()
    assert (code, said in err) == (2, True)
