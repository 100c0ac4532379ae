"""Ten faults planted in a live vLLM are named, by `locate` and from captures; where nothing is planted, nothing is."""

from __future__ import annotations

from contextlib import closing

import pytest

from kc_otel.diagnose.captures import Capture, compare_captures
from kc_otel.diagnose.kernel_sources import capture_kernel
from kc_otel.diagnose.torch_locate import locate
from tests.engines.planted_in_vllm import (
    AFTER_HEAD,
    CAP,
    CONTRACT,
    ENGINE,
    ENGINE_FAULTS,
    LAYERS,
    conversations,
    mixture,
    planted,
    training,
)

pytestmark = pytest.mark.slow
LAYER = LAYERS - 2


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    from kc_otel.diagnose.vllm_kernel import VllmKernel

    folder = mixture(tiny_model, str(tmp_path_factory.mktemp("mixture") / "checkpoint"))
    with closing(VllmKernel.of(str(folder), ENGINE)) as kernel:
        yield training(folder), kernel, conversations(kernel._tokenizer)


@pytest.fixture(scope="module")
def captured(pair):
    return lambda kernel: Capture("tests", tuple(capture_kernel(kernel, pair[2])))


@pytest.fixture(scope="module")
def training_capture(pair, captured):
    return captured(pair[0])


def is_named(found, fault):
    culprit = found.culprit
    assert culprit is not None, fault.name
    assert (culprit.kind, culprit.boundary.operator) == (fault.kind, fault.operator)
    assert culprit.boundary.layer == (LAYER if fault.in_layer else None)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=pytest.mark.long if number % 3 else ())
        for number, fault in enumerate(ENGINE_FAULTS)
    ],
)
def test_a_fault_in_an_engine_is_named(pair, captured, training_capture, fault):
    """By both kernels on one machine, and by what two machines wrote of theirs."""
    train, kernel, sequences = pair
    with planted(kernel, fault, LAYER):
        found = locate(CONTRACT, train, kernel, sequences, shares=False)
        capture = captured(kernel)
    is_named(found, fault)
    assert {finding.boundary.layer for finding in found.findings} == {found.culprit.boundary.layer}
    is_named(compare_captures(CONTRACT, training_capture, capture), fault)


@pytest.mark.parametrize("fault", AFTER_HEAD, ids=lambda fault: fault.name)
def test_a_difference_after_the_head_of_an_engine_is_named(pair, captured, training_capture, fault):
    train, kernel, sequences = pair
    with planted(kernel, fault, LAYER):
        answers = {
            "lm_head": locate(CONTRACT, train, kernel, sequences, shares=False),
            "head": compare_captures(CONTRACT, training_capture, captured(kernel)),
        }
    for place, found in answers.items():
        is_named(found, fault)
        assert found.culprit.sentence.startswith(f"after {place}: the outputs differ though every operator agrees; ")


def test_a_cap_of_both_kernels_is_no_fault_of_the_head(pair):
    """An engine has it within its head's module, and a training kernel behind its head."""
    train, kernel, sequences = pair

    def capped(_, __, output):
        output.logits = CAP * (output.logits / CAP).tanh()
        return output

    handle = train.module.register_forward_hook(capped)
    try:
        with planted(kernel, AFTER_HEAD[1], LAYER):
            assert locate(CONTRACT, train, kernel, sequences, shares=False).findings == ()
    finally:
        handle.remove()


def test_nothing_is_named_in_a_mended_engine(pair, captured, training_capture):
    train, kernel, sequences = pair
    found = locate(CONTRACT, train, kernel, sequences)
    assert found.findings == ()
    assert {"router", "experts", "rotary", "kv_cache", "head", "sampler"} <= {
        row.boundary.operator for row in found.boundaries
    }
    assert compare_captures(CONTRACT, training_capture, captured(kernel)).findings == ()
