"""Kernels that are not ours, with integer weights, before the gate: ONNX Runtime and llama.cpp."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.cpu_engines import __main__ as example

pytestmark = pytest.mark.slow


def gated(engine, checkpoint, folder):
    """Per number format the exit status of the gate, and the estimate by slice."""
    found = {}
    for dtype, recording in example.recorded(engine, checkpoint, folder):
        status = example.gate(recording, folder, engine, dtype)
        verdicts = json.loads((folder / dtype / "evidence.json").read_text())["verdicts"]
        found[dtype] = status, {verdict["slice"]: verdict["estimate"] for verdict in verdicts}
    return found


def test_onnx_runtimes_int8_is_refused_and_its_float32_goes_on(tiny_model, tmp_path):
    """The graph in float32 is the checkpoint but for rounding; the same graph in int8 breaks the limit on tables.

    How far it drifts depends on the processor's products of bytes: 0.0082 where they have instructions of their own
    (VNNI, AMX), 0.0146 on another.
    """
    found = gated("onnxruntime", tiny_model, tmp_path)
    assert found["float32"][0] == 0
    assert found["float32"][1]["all"] < 1e-5
    assert found["int8"][0] == 1
    assert found["int8"][1]["tables"] > 0.006
    with np.load(tmp_path / "int8.npz") as recording:
        assert np.exp(recording["inference_logprobs"]).max() <= 1.0


def test_llama_cpp_goes_on_in_eight_bits_and_is_refused_in_four(tiny_model, tmp_path):
    found = gated("llama.cpp", tiny_model, tmp_path)
    assert {dtype: status for dtype, (status, _) in found.items()} == {"F16": 0, "Q8_0": 0, "Q4_0": 1}
    drift = [found[dtype][1]["all"] for dtype in ("F16", "Q8_0", "Q4_0")]
    assert drift[0] < 1e-3 < drift[1] < drift[2] / 4
