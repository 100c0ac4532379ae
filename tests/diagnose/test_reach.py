"""Boundaries at the end of a model, and those that sequences do not reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from kc_otel.diagnose import torch_measure
from kc_otel.diagnose.above_noise import Measured, batch_dependence, boundary_drift
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, Boundary
from kc_otel.diagnose.captures import Capture, CaptureWriter, compare_captures, read_capture
from kc_otel.diagnose.kernel_sources import capture_kernel
from kc_otel.diagnose.located import located_json, located_lines, located_sentence
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_locate import locate
from tests.diagnose.test_above_noise import located, measured
from tests.tools.contracts import contract_of

CONTRACT = contract_of("planted")
LONG_ONLY = Boundary(1, "k_proj")
UNREACHED = "no sequence reached these operators of both kernels: k_proj in layers 0-1; give 4 or more that do"


class Layer(nn.Module):
    """One product of every sequence, and one of long ones."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        x = x + torch.tanh(self.q_proj(x))
        return x + self.k_proj(x) if x.shape[1] > 24 else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.lm_head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.eval()

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def kernels(faulty="k_proj", kind=TorchKernel):
    train, inference = TorchKernel(Model()), kind(Model())
    inference.module.layers[1].get_submodule(faulty).weight.data *= 1.5
    return train, inference


def sequences(*lengths):
    rng = np.random.default_rng(0)
    return [TokenSequence(tuple(rng.integers(0, 64, length).tolist()), 2) for length in lengths]


def compared(train, inference, given, through):
    if through == "captures":
        return compare_captures(CONTRACT, *(Capture("x", tuple(capture_kernel(k, given))) for k in (train, inference)))
    return locate(CONTRACT, train, inference, given, shares=False)


@pytest.mark.parametrize("through", ["chunks", "captures"])
@pytest.mark.parametrize("long_first", [False, True])
def test_a_fault_that_some_chunks_do_not_reach_is_named(monkeypatch, through, long_first):
    monkeypatch.setattr(torch_measure, "_MAX_OUTPUT_BYTES", 1)
    lengths = sorted([10] * 6 + [32] * 6, reverse=long_first)
    found = compared(*kernels(), sequences(*lengths), through)
    assert found.culprit.boundary == LONG_ONLY
    rows = [row.boundary for row in found.boundaries]
    assert rows.index(Boundary(1, "q_proj")) < rows.index(LONG_ONLY) < rows.index(Boundary(1, "block"))
    assert found.boundaries[rows.index(LONG_ONLY)].drift.samples == 6
    assert found.unreached == ()


@pytest.mark.parametrize("through", ["kernels", "captures"])
def test_an_operator_that_no_sequence_reaches_is_listed_and_leaves_the_answer_undecided(through):
    found = compared(*kernels(), sequences(*[10] * 8), through)
    assert found.undecided.startswith(UNREACHED)
    assert "whose weights alone a function is given" in found.undecided
    assert any(line.startswith(f"undecided: {UNREACHED}") for line in located_lines(found))
    assert located_sentence(found).startswith(f"undecided which operator it is: {UNREACHED}")
    listed = [{"layer": layer, "operator": "k_proj", "part": 0} for layer in (0, 1)]
    assert located_json(found)["unreached"] == listed


def test_an_operator_that_no_sequence_reaches_is_listed_beside_a_culprit():
    found = compared(*kernels(faulty="q_proj"), sequences(*[10] * 8), "kernels")
    assert (found.culprit.boundary, found.undecided) == (Boundary(1, "q_proj"), "")
    assert any(line.startswith(f"note: {UNREACHED}") for line in located_lines(found))


def test_a_capture_keeps_what_its_sequences_did_not_reach(tmp_path):
    given = sequences(10, 32)
    writer = CaptureWriter(tmp_path / "a.capture", "tests")
    for index, sequence in enumerate(capture_kernel(TorchKernel(Model()), given)):
        writer.write(index, given[index].token_ids, sequence)
    writer.seal()
    kept = [sequence.unreached for sequence in read_capture(tmp_path / "a.capture").sequences]
    assert kept == [(Boundary(0, "k_proj"), LONG_ONLY), ()]


class Unseen(TorchKernel):
    """An engine of which an operator's outputs cannot be taken whole."""

    def run(self, *args, **options):
        taken, logits = super().run(*args, **options)
        return {key: values for key, values in taken.items() if key != Boundary(1, "q_proj")}, logits


def test_the_fault_of_an_operator_that_is_not_seen_counts_to_the_next():
    found = compared(*kernels(faulty="q_proj", kind=Unseen), sequences(*[10] * 8), "kernels")
    assert (found.culprit.kind, found.culprit.boundary) == ("drift", Boundary(1, "block"))
    assert "the inference kernel has none of these, so they count to the next that both have: q_proj in layer 1" in (
        found.notes
    )


@pytest.mark.parametrize(
    ("reached", "error", "answer"),
    [
        (8, 1.0, "named"),
        (1, 1.0, "which proves nothing at 2 boundaries; give 3 sequences or more that reach it"),
        (1, 0.0, "too few to name one: k_proj in layer 1; give 3 or more that do, such as longer ones"),
        (8, 0.0, ""),
    ],
)
def test_a_boundary_is_judged_on_the_sequences_that_reach_it(reached, error, answer):
    """Eight of a hundred are enough where all eight differ, and one is not, neither for a fault nor against one."""

    def measured(errors):
        errors = np.asarray([*errors, *[np.nan] * (100 - len(errors))])
        none = np.full(100, np.nan)
        return Measured(errors, errors, none, errors, none, none, none, allowed=np.where(np.isnan(errors), none, 0.0))

    family = {Boundary(1, "q_proj"): measured([0.0] * 100), LONG_ONLY: measured([error] * reached)}
    quiet = {key: Measured(m.local, m.drift, *[np.full(100, np.nan)] * 5) for key, m in family.items()}
    rows = boundary_drift(quiet, 0.005)
    assert [row.is_above for row in rows] == [False, answer == "named"]
    assert list(batch_dependence(family, 0.005, 0.0)) == ([LONG_ONLY] if answer == "named" else [])
    if answer != "named":
        assert located(rows).undecided.endswith(answer)
        assert bool(located(rows).undecided) is bool(answer)


THROUGH = pytest.mark.parametrize("through", ["kernels", "captures"])
GIVEN = sequences(*[28] * 8)


def kernel(after=lambda logits: logits, faulty=None):
    """The model with a function after its head, and perhaps a fault in an operator."""
    model = Model()
    if faulty:
        model.get_submodule(faulty).weight.data *= 1.5
    model.register_forward_hook(lambda _, __, logits: after(logits))
    return TorchKernel(model)


def capped(logits):
    return 0.5 * torch.tanh(logits / 0.5)


@THROUGH
@pytest.mark.parametrize("after", [lambda logits: logits / 0.7, capped], ids=["temperature", "soft cap"])
def test_a_difference_after_the_head_is_named_and_is_no_missing_culprit(after, through):
    found = compared(kernel(), kernel(after), GIVEN, through)
    assert [finding.boundary for finding in found.findings] == [OUTPUT]
    place = "lm_head" if through == "kernels" else "head"
    assert found.culprit.sentence.startswith(f"after {place}: the outputs differ though every operator agrees; ")
    assert not any(line.startswith("no culprit") for line in located_lines(found))
    assert located_sentence(found).startswith("first divergence: model_output (8 sequences")


def test_a_difference_after_the_head_has_all_of_the_drift():
    found = locate(CONTRACT, kernel(), kernel(capped), GIVEN)
    assert [component.name for component in found.shares.components] == ["model_output"]
    assert found.explained == pytest.approx(1.0)
    part = replace(found, observed=4.0 * found.observed)
    said = "of the 25 % of tv_token that errors above noise make comes from model_output (roughly)"
    assert said in located_sentence(part)
    assert said.replace("tv_token", "tv_token on all") in "\n".join(located_lines(part))


@THROUGH
def test_log_probabilities_are_no_other_output_than_logits(through):
    assert compared(kernel(), kernel(lambda logits: logits.log_softmax(-1)), GIVEN, through).findings == ()


@pytest.mark.parametrize("faulty", ["layers.1.q_proj", "lm_head"])
def test_an_error_of_an_operator_does_not_count_again_after_the_head(faulty):
    found = compared(kernel(capped), kernel(capped, faulty), GIVEN, "kernels")
    assert [finding.boundary for finding in found.findings] == [Boundary(1, "q_proj") if "q" in faulty else HEAD]


def test_an_operator_and_what_follows_the_head_are_both_named():
    found = compared(kernel(), kernel(capped, "lm_head"), GIVEN, "kernels")
    assert [str(finding.boundary) for finding in found.findings] == ["head", "model_output"]
    assert found.findings[1].sentence.startswith("after lm_head: the outputs differ; ")


def test_kernels_that_share_nothing_but_their_outputs_are_refused():
    with pytest.raises(ValueError, match="the two kernels share no operator by name"):
        boundary_drift({OUTPUT: measured([1.0] * 8)}, 0.01)
