"""From a served request to a verdict, each box a process of its own, and two of them killed on the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from examples.demo.evaluator import evaluating
from examples.tiny_model import prompts
from examples.vllm_server.server import NAME, serving
from kc_otel.client.webhooks import new_secret
from kc_otel.integrations.vllm import KernelContractInstrumentor
from kc_otel.recordings.spool import SpoolReader
from tests.engines._served import kept, rescoring, send, wait_for
from tests.engines._vllm import offline_engine

pytestmark = pytest.mark.slow

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: served, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: float32}, inference: {engine: vllm, dtype: bfloat16}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.1}]
observability: {window: 20m, long_window: 1h, min_samples: 500, sampling: 1.0}
escalation: [{on: fail, do: [notify]}]
"""
PROCESSED = {"temperature": 0.8, "top_p": 0.9}
TOKENS = 16
EACH = 150
CONTEXT = 1024


@pytest.fixture(scope="module")
def story(tiny_model, tmp_path_factory):
    """Everything that happens, once; the tests look at what came of it."""
    folder = tmp_path_factory.mktemp("served")
    contract, spool = folder / "contract.yaml", folder / "requests.sqlite"
    contract.write_text(CONTRACT)
    found = SimpleNamespace(spool=spool)
    serve_and_kill(tiny_model, contract, spool, folder / "vllm.log", found)
    restart_with_raw_logprobs(tiny_model, contract, spool, found)
    with SpoolReader(spool) as reader:
        found.requests = [request for _, request in reader.take(10_000)]
    with evaluating(contract, folder, "http://127.0.0.1:9/", new_secret()) as evaluator:
        first = rescoring(spool, contract, evaluator.otlp, "--model", tiny_model, "--batch-tokens", "64")
        before = len(found.requests)
        try:
            wait_for(lambda: len(kept(spool)) < before or first.poll() is not None, 300.0, "the first confirmation")
        finally:
            first.kill()
        found.log = first.communicate()[0]
        found.left = kept(spool)
        second = rescoring(spool, contract, evaluator.otlp, "--model", tiny_model, "--weights", "checkpoint-8")
        found.summary = second.communicate(timeout=1200)[0]
        assert second.returncode == 0, found.summary
        found.left_over = kept(spool)
        tokens = TOKENS * 2 * EACH
        wait_for(lambda: max(cell["samples"] for cell in evaluator.verdicts()) >= tokens, 300.0, "verdicts")
        found.cells = evaluator.verdicts()
    return found


def serve_and_kill(model, contract, spool, log, found):
    """A server with two more variables; some traffic, then more of it during which the server is killed."""
    variables = {"KC_OTEL_CONTRACT": str(contract), "KC_OTEL_SPOOL": str(spool), "VLLM_SERVER_DEV_MODE": "1"}
    with serving(model, variables, log=log, options=("--logprobs-mode", "processed_logprobs")) as server:
        address = server.address
        for task in ("code", "prose"):
            assert len(send(address, task, EACH, tokens=TOKENS, **PROCESSED)) == EACH
        httpx.post(f"{address}/update_weight_version", json={"new_version": "checkpoint-9"}).raise_for_status()
        send(address, "code", 3, tokens=TOKENS)
        wait_for(lambda: len(kept(spool)) == 2 * EACH + 3, 300.0, "every answered request in the spool")
        found.acknowledged = kept(spool)
        with ThreadPoolExecutor(1) as clients:
            more = clients.submit(send, address, "prose", EACH, tokens=TOKENS)
            wait_for(lambda: len(kept(spool)) > len(found.acknowledged) + 10, 300.0, "the traffic to go on")
            server.kill()
            found.cut_off = EACH - len(more.result())
    found.after_kill = kept(spool)


def restart_with_raw_logprobs(model, contract, spool, found):
    """An engine on the same spool, whose log-probabilities are from before temperature, as by default."""
    from vllm import SamplingParams

    instrumentor = KernelContractInstrumentor()
    with offline_engine(model) as engine:
        instrumentor.instrument(contract=contract, spool=spool)
        try:
            texts = prompts("code", 4, characters=60)
            for options in (PROCESSED, {}):
                engine.generate(texts, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options), use_tqdm=False)
            assert instrumentor.flush()
            found.stats = instrumentor.stats()
        finally:
            instrumentor.uninstrument()


def test_a_killed_server_loses_nothing_that_was_written(story):
    """Requests that had reached the spool are there after kill -9 during traffic, and can be read, each once."""
    assert story.cut_off > 0
    assert story.after_kill[: len(story.acknowledged)] == story.acknowledged
    assert len(set(story.after_kill)) == len(story.after_kill) > len(story.acknowledged) + 10
    assert len(story.requests) == len(story.after_kill) + 8
    assert all(request.token_ids.size == request.logprobs.size == TOKENS for request in story.requests)


def test_requests_carry_what_they_were_drawn_with(story):
    """Slices, processing, weights and the engine's fingerprint came through the server by variables alone."""
    served = story.requests[: 2 * EACH]
    assert [request.attributes["task"] for request in served].count("code") == EACH
    assert all(request.processing == PROCESSED and request.logprobs_mode == "processed" for request in served)
    assert {request.weights for request in story.requests[: 2 * EACH]} == {None}
    assert [request.weights for request in story.requests[2 * EACH : 2 * EACH + 3]] == ["checkpoint-9"] * 3
    assert {request.kernel.dtype for request in story.requests} == {"bfloat16"}


def test_a_killed_rescorer_loses_nothing(story):
    """What it had not confirmed is in the spool, in its order; the rollouts of a prompt are taken together."""
    names = [request.request_id for request in story.requests]
    assert 0 < len(story.left) < len(names), story.log
    assert story.left == [name for name in names if name in set(story.left)]
    assert story.left_over == []


def test_what_cannot_be_compared_is_refused_with_its_reason(story):
    """Each where it is reached: before the rescorer was killed, or after it was started again."""
    again = [request for request in story.requests if request.request_id in set(story.left)]
    raw = [request for request in again if request.logprobs_mode == "raw" and request.processing]
    assert raw
    assert f"not comparable: {len(raw)} raw_logprobs" in story.summary
    assert "start vLLM with --logprobs-mode processed_logprobs" in story.summary
    refused = [request for request in again if request.weights == "checkpoint-9"]
    assert refused
    assert f"not comparable: {len(refused)} wrong_weights" in story.summary


def test_every_slice_gets_its_verdict(story):
    found = {cell["slice"]: cell for cell in story.cells}
    assert {name: cell["status"] for name, cell in found.items()} == {"all": "PASS", "code": "PASS", "prose": "PASS"}
    comparable = [r for r in story.requests if r.weights is None and not (r.logprobs_mode == "raw" and r.processing)]
    for name in ("code", "prose"):
        tokens = TOKENS * sum(request.attributes.get("task") == name for request in comparable)
        assert found[name]["samples"] >= tokens  # what a killed rescorer exported and did not confirm comes twice


def test_a_server_scores_what_was_served(tiny_model, tmp_path):
    """Also the one that served it, whose spool keeps no scoring; what it cannot score is said, with the remedy."""
    contract, spool = tmp_path / "contract.yaml", tmp_path / "requests.sqlite"
    contract.write_text(CONTRACT.replace("engine: torch, dtype: float32", "engine: vllm, dtype: bfloat16"))
    variables = {"KC_OTEL_CONTRACT": str(contract), "KC_OTEL_SPOOL": str(spool)}
    options = ("--logprobs-mode", "processed_logprobs")
    with (
        evaluating(contract, tmp_path, "http://127.0.0.1:9/", new_secret()) as evaluator,
        serving(tiny_model, variables, log=tmp_path / "vllm.log", options=options) as server,
    ):
        send(server.address, "code", 12, tokens=TOKENS)
        send(server.address, "code", 3, tokens=TOKENS, temperature=0.5)
        wait_for(lambda: len(kept(spool)) == 15, 300.0, "every answered request in the spool")
        text = prompts("code", 1, characters=60)[0]
        size = httpx.post(f"{server.address}/tokenize", json={"model": NAME, "prompt": text}).json()["count"]
        send(server.address, "code", 1, tokens=CONTEXT - size)
        wait_for(lambda: len(kept(spool)) == 16, 300.0, "the request that fills the context")
        scored = rescoring(spool, contract, evaluator.otlp, "--train-url", f"{server.address}/v1")
        said = scored.communicate(timeout=600)[0]
        assert scored.returncode == 0, said
        assert f"12 requests scored: {12 * TOKENS} sampled tokens compared" in said
        assert "not comparable: 3 unsupported_processing" in said
        assert "not comparable: 1 scoring_failed" in said
        assert f"a request of {CONTEXT:,} tokens fills the context" in said
        assert "HTTP Request" not in said
        wait_for(lambda: any(cell["samples"] for cell in evaluator.verdicts()), 120.0, "verdicts")
        (cell,) = (cell for cell in evaluator.verdicts() if cell["slice"] == "code")
        assert cell["samples"] == 12 * TOKENS
        assert 0.0 <= cell["estimate"] < 0.05
        send(server.address, "code", 1, tokens=TOKENS)
        wait_for(lambda: kept(spool), 300.0, "the request after the scoring")
        assert len(kept(spool)) == 1
