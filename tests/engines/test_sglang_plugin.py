"""The plugin of SGLang against its own hook registry, structs and sampling masks, without an engine: that takes a GPU.

SGLang lies beside the environment (`make engines`), and of it only what needs neither sgl_kernel nor a GPU is imported:
its packages' own `__init__` are left out. What stands in for the front end has the methods whose names and arguments
are compared with SGLang's source here.
"""

from __future__ import annotations

import ast
import asyncio
import json
import sys
import types
from array import array
from pathlib import Path

import numpy as np
import pytest

from kc_otel.integrations.sglang.sglang_capture import SglangCapture
from kc_otel.integrations.sglang.sglang_plugin import HOOKED, load
from kc_otel.recordings.request import versions_per_token
from kc_otel.recordings.spool import SpoolReader
from tests.tools.contracts import contract_text

HOME = Path(sys.prefix) / "sglang" / "sglang"
CONTRACT = contract_text(
    kernels={"train": {"engine": "torch"}, "inference": {"engine": "sglang"}},
    slices={"code": {"where": {"task": "code"}}},
    observability={"sampling": 1.0},
)

pytestmark = pytest.mark.skipif(not HOME.exists(), reason="SGLang is not beside this environment; make engines")


def source(name):
    return ast.parse((HOME / name).read_text(encoding="utf-8"))


def found(tree, name):
    return next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)


@pytest.fixture
def sglang():
    """SGLang's packages without their `__init__`, and a module in which its front end would be."""
    every = {}
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.sampling", "sglang.srt.utils",
                 "sglang.srt.managers"):  # fmt: skip
        every[name] = types.ModuleType(name)
        every[name].__path__ = [str(HOME.joinpath(*name.split(".")[1:]))]
    module = types.ModuleType("sglang.srt.managers.tokenizer_manager")
    module.TokenizerManager = type("TokenizerManager", (FrontEnd,), dict(vars(FrontEnd)))
    every[module.__name__] = module
    for name, attribute in every.items():
        if "." in name:
            setattr(every[name.rpartition(".")[0]], name.rpartition(".")[2], attribute)
    sys.modules.update(every)
    yield module.TokenizerManager
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


class FrontEnd:
    """What requests go through, in the place of SGLang's TokenizerManager."""

    def __init__(self):
        self.server_args = types.SimpleNamespace(
            served_model_name="model", dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8_e4m3", tp_size=2,
            pp_size=1, attention_backend="fa3", disable_cuda_graph=False, enable_deterministic_inference=True,
        )  # fmt: skip
        self.sent, self.answered = [], []

    def config_value(self, name):
        return {"weight_version": "7"}[name]

    async def _send_one_request(self, tokenized_obj):
        self.sent.append(tokenized_obj)

    async def _send_batch_request(self, tokenized_objs):
        self.sent += tokenized_objs

    async def _handle_batch_output(self, recv_obj):
        self.answered.append(recv_obj)


@pytest.fixture
def manager(sglang, tmp_path, monkeypatch):
    """A front end with the plugin, which writes to `requests.sqlite`."""
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    monkeypatch.setenv("KC_OTEL_CONTRACT", str(tmp_path / "contract.yaml"))
    monkeypatch.setenv("KC_OTEL_SPOOL", str(tmp_path / "requests.sqlite"))
    captures = []
    made = SglangCapture.__init__
    monkeypatch.setattr(SglangCapture, "__init__", lambda self, *a: (captures.append(self), made(self, *a))[1])
    load()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    front = sglang()
    front.capture = captures[0]
    front.requests = lambda: read(front, tmp_path / "requests.sqlite")
    return front


def read(front, path):
    assert front.capture.flush()
    sink = front.capture._delivery.sink
    assert sink.flush()
    with SpoolReader(path) as reader:
        return {request.request_id: request for _, request in reader.take(100)}


def tokenized(rid="a", **changes):
    """A request as SGLang's front end has tokenized it."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 8, **changes.pop("params", {})})
    fields = {"return_logprob": False, "input_ids": array("q", [5, 6]), "return_sampling_mask": False}
    return types.SimpleNamespace(rid=rid, sampling_params=params, **{**fields, **changes})


def output(rid="a", ids=(1, 2), logprobs=(-0.5, -0.25), reason=None, **lists):
    """What comes back from the scheduler of one request."""
    return types.SimpleNamespace(
        rids=[rid], finished_reasons=[reason and {"type": reason}], output_token_logprobs_idx=[list(ids)],
        output_token_logprobs_val=[list(logprobs)], **{name: [value] for name, value in lists.items()},
    )  # fmt: skip


def run(front, *steps):
    async def serve():
        for step in steps:
            if isinstance(step, list):
                await front._send_batch_request(step)
            elif hasattr(step, "rid"):
                await front._send_one_request(step)
            else:
                await front._handle_batch_output(step)

    asyncio.run(serve())


def test_the_hooked_methods_and_fields_are_those_of_sglang():
    """In the source of the release that the plugin names: a method that moves or a field that goes shows here."""
    manager = found(source("srt/managers/tokenizer_manager.py"), "TokenizerManager")
    arguments = {
        node.name: [argument.arg for argument in node.args.args]
        for node in manager.body
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
    }
    for target in HOOKED.values():
        ours = getattr(FrontEnd, name := target.rpartition(".")[2])
        assert target.startswith("sglang.srt.managers.tokenizer_manager.TokenizerManager.")
        assert arguments[name] == list(ours.__code__.co_varnames[: ours.__code__.co_argcount])
    assert arguments["config_value"] == ["self", "name"]
    structs = source("srt/managers/io_struct.py")
    declared = {
        name: {node.target.id for node in found(structs, name).body if isinstance(node, ast.AnnAssign)}
        for name in ("TokenizedGenerateReqInput", "BatchStrOutput", "BatchTokenIDOutput")
    }
    sent = {"input_ids", "sampling_params", "return_logprob", "return_sampling_mask", "sampling_logprobs_mode"}
    sent |= {"input_embeds", "mm_inputs", "session_params", "positional_embed_overrides", "custom_logit_processor"}
    assert sent <= declared["TokenizedGenerateReqInput"]
    back = {"finished_reasons", "output_token_logprobs_val", "output_token_logprobs_idx", "weight_versions"}
    for name in ("BatchStrOutput", "BatchTokenIDOutput"):
        assert back | {"output_token_sampling_mask"} <= declared[name]


def test_a_request_is_kept_with_its_log_probabilities_and_the_client_sees_nothing(manager):
    request = tokenized(params={"temperature": 0.7, "custom_params": {"task": "code"}})
    run(manager, request, output(ids=[1], logprobs=[-0.5]), output(ids=[2, 3], logprobs=[-1.0, -2.0], reason="stop"))
    assert request.return_logprob
    kept = manager.requests()["a"]
    assert (kept.prompt_ids.tolist(), kept.token_ids.tolist()) == ([5, 6], [1, 2, 3])
    np.testing.assert_array_equal(kept.logprobs, np.float32([-0.5, -1.0, -2.0]))
    assert (kept.processing, kept.logprobs_mode, kept.weights) == ({"temperature": 0.7}, "processed", 7)
    assert kept.attributes["task"] == "code"
    assert (kept.kernel.engine, kept.kernel.quantization, kept.kernel.parallelism) == ("sglang", "fp8", "tp=2")
    assert len(manager.answered) == 2


def test_weight_versions_are_those_of_each_token(manager):
    from sglang.srt.utils.weight_versions import WeightVersionSpan

    spans = [WeightVersionSpan(version="3", start=0, end=1), WeightVersionSpan(version="4", start=1, end=2)]
    run(manager, [tokenized()], output(reason="length", weight_versions=spans))
    assert versions_per_token(manager.requests()["a"]).tolist() == [3, 4]


@pytest.mark.parametrize("mode", ["selected", "support"])
def test_a_sampling_mask_makes_truncated_requests_comparable(manager, mode):
    from sglang.srt.sampling.sampling_mask import SamplingMaskChunk

    of_support = np.log(np.float32([0.6, 0.4, 1.0]))
    chunk = SamplingMaskChunk(
        lengths=np.int32([2, 1]), token_ids=np.int32([9, 1, 2]),
        logprobs=of_support if mode == "support" else of_support[1:],
    )  # fmt: skip
    asked = tokenized(params={"top_p": 0.9}, return_sampling_mask=True, sampling_logprobs_mode=mode)
    run(manager, asked, output(reason="stop", output_token_sampling_mask=chunk))
    run(manager, tokenized("b", params={"top_p": 0.9}), output("b", reason="stop"))
    kept = manager.requests()
    assert kept["a"].logprobs_mode == "processed"
    np.testing.assert_allclose(np.exp(kept["a"].logprobs), [0.4, 1.0], rtol=1e-6)
    assert (kept["a"].kept.ids.tolist(), kept["a"].kept.counts.tolist()) == ([9, 1, 2], [2, 1])
    assert (kept["b"].logprobs_mode, kept["b"].processing) == ("raw", {"top_p": 0.9})


def test_greedy_and_original_log_probabilities_are_told(manager, monkeypatch):
    """SGLang makes temperature 0 a top-k of 1; its variable takes log-probabilities from before temperature."""
    greedy = tokenized(params={"temperature": 0.0})
    greedy.sampling_params.normalize(None)
    run(manager, greedy, output(reason="stop"))
    assert manager.requests()["a"].processing["temperature"] == 0.0
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    run(manager, tokenized("b", params={"temperature": 0.5}), output("b", reason="stop"))
    assert manager.requests()["b"].logprobs_mode == "raw"


def test_what_cannot_be_scored_again_is_counted(manager):
    """Images, aborted requests, and the warming of a common prefix, which is no request at all."""
    run(manager, tokenized("image", mm_inputs=object()), output("image", reason="stop"))
    run(manager, tokenized("gone"), output("gone", reason="abort"))
    run(manager, tokenized("warm", params={"max_new_tokens": 0}), output("warm", reason="length"))
    assert manager.requests() == {}
    stats = manager.capture.stats()
    assert (stats.seen, stats.dropped) == (2, {"unsupported": 1, "aborted": 1})


def test_a_fault_of_ours_does_not_reach_sglang(manager, caplog, tmp_path):
    run(manager, tokenized(), output(reason="stop", output_token_sampling_mask=None))
    broken = tokenized("b")
    broken.input_ids = 5
    run(manager, broken, output("b", reason="stop"))
    assert manager.capture.stats().dropped == {"failed": 1}
    assert len(manager.answered) == 2
    (tmp_path / "contract.yaml").write_text(json.dumps({}))
    fresh = SglangCapture(lambda: (_ for _ in ()).throw(ValueError("contract.yaml:1: apiVersion: is missing")))
    for _ in range(2):
        try:
            fresh.sent(manager, tokenized("c"))
        except ValueError as error:
            fresh.failed(error)
    assert [record.message for record in caplog.records if "not instrumented" in record.message] == [
        "kc-otel: SGLang is not instrumented: contract.yaml:1: apiVersion: is missing"
    ]


def test_without_a_contract_nothing_is_hooked(sglang, monkeypatch):
    monkeypatch.delenv("KC_OTEL_CONTRACT", raising=False)
    load()
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert not HookRegistry._hooks
    assert sglang._send_one_request is FrontEnd._send_one_request
