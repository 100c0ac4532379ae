"""Input faults, planted with the real engine: each is found under its own name, and without it everything passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

from examples.tiny_model import prompts
from kc_otel.record.kernel import Kernel
from kc_otel.record.measure.checks import InvalidReason, check, failed
from kc_otel.record.recorder import Recorder
from kc_otel.recordings.comparable import refusal
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.scoring import hf_scorer
from tests.engines._vllm import contract, offline_engine

pytestmark = pytest.mark.slow

TOKENS = 96
WARM, NARROW = {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}


class Memory(MetricExporter):
    """Keeps the latest point of each stream."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def export(self, metrics_data, **_):
        for resource in metrics_data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        self.found[metric.name, tuple(sorted(point.attributes.items()))] = point
        return MetricExportResult.SUCCESS

    def force_flush(self, **_):
        return True

    def shutdown(self, **_):
        pass

    def points(self, name, kernel=None):
        """Points of the slice `all`, of one inference kernel or of each."""
        return [
            point
            for (metric, attributes), point in self.found.items()
            if metric == name
            and dict(attributes).get("kc.slice") == "all"
            and kernel in (None, dict(attributes).get("kc.kernel.inference"))
        ]


@pytest.fixture(scope="module")
def training(tiny_model):
    """The model as the training kernel, in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def asked(training):
    """Prompts of two slices, as ids."""
    _, tokenizer = training
    return [tokenizer(text)["input_ids"] for name in ("code", "prose") for text in prompts(name, 6, characters=90)]


def sampled(engine, asked, processing):
    """Tokens and log-probabilities that vLLM reports for them."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=TOKENS, logprobs=0, ignore_eos=True, **processing)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in asked], parameters, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        np.array([at[token].logprob for at, token in zip(output.outputs[0].logprobs, row, strict=True)])
        for output, row in zip(outputs, tokens, strict=True)
    ]
    return np.array(tokens), np.array(logprobs)


def rolled_out(model, asked, mode, *processings, dtype="float32"):
    """What an engine of its own samples with each processing; no engine is left when the next one starts."""
    with offline_engine(model, dtype=dtype, max_model_len=256, logprobs_mode=mode) as engine:
        return [sampled(engine, asked, processing) for processing in processings]


@pytest.fixture(scope="module")
def rollouts(tiny_model, asked):
    """Tokens and log-probabilities from vLLM in float32, by how they were sampled and reported."""
    (raw,) = rolled_out(tiny_model, asked, "raw_logprobs", WARM)
    plain, warm, narrow = rolled_out(tiny_model, asked, "processed_logprobs", {"temperature": 1.0}, WARM, NARROW)
    return {"plain": plain, "warm": warm, "narrow": narrow, "warm, raw": raw}


@pytest.fixture(scope="module")
def plain(rollouts, training, asked):
    """Tokens, log Q and log P at temperature 1 without a fault."""
    tokens, inference = rollouts["plain"]
    return tokens, inference, np.array(hf_scorer(training[0])(asked, list(tokens)))


def drift(train, inference):
    return float(np.abs(train - inference).mean())


def faulty(train, inference, **options):
    return {reason: rows.size for reason, rows in failed(check(train, inference, **options)).items()}


def test_without_a_fault_everything_passes_and_drift_is_rounding(plain):
    """float32 against float32: no reason anywhere, and a mean |l| of a few millionths."""
    tokens, inference, train = plain
    assert faulty(train, inference, train_token_ids=tokens, inference_token_ids=tokens) == {}
    assert drift(train, inference) < 2e-5


def test_temperature_and_truncation_pass_when_both_sides_have_them(rollouts, training, asked):
    """The same requests without the fault: processed log-probs of the engine, and the same processing in training."""
    score = hf_scorer(training[0])
    for key, processing in (("warm", WARM), ("narrow", NARROW)):
        tokens, inference = rollouts[key]
        train = np.array(score(asked, list(tokens), processing))
        assert faulty(train, inference) == {}
        assert np.quantile(np.abs(train - inference), 0.98) < 1e-3


def test_the_temperature_trap_is_named(rollouts, training, asked):
    """raw_logprobs, vLLM's default, are at temperature 1 whatever the request's: nobody declared anything."""
    tokens, inference = rollouts["warm, raw"]
    train = np.array(hf_scorer(training[0])(asked, list(tokens), WARM))
    assert faulty(train, inference)["temperature_mismatch"] >= 11
    request = SampledRequest(
        request_id="r",
        prompt_ids=np.array(asked[0]),
        token_ids=tokens[0],
        logprobs=inference[0].astype(np.float32),
        kernel=Kernel("vllm"),
        processing=WARM,
        logprobs_mode="raw",
    )
    assert refusal(request)[0] == "raw_logprobs"


def test_a_training_side_without_the_temperature_is_named(rollouts, training, asked):
    """The other way round: the engine reports what it sampled from, and training forgets to divide its logits."""
    tokens, inference = rollouts["warm"]
    train = np.array(hf_scorer(training[0])(asked, list(tokens)))
    assert faulty(train, inference) == {"temperature_mismatch": 12}
    assert faulty(train, inference, processing=({"temperature": 1.0}, WARM)) == {"processing_mismatch": 12}


def test_top_p_on_one_side_is_named(rollouts, training, asked):
    """Sampled with top-p 0.9 and scored without."""
    tokens, inference = rollouts["narrow"]
    train = np.array(hf_scorer(training[0])(asked, list(tokens)))
    assert faulty(train, inference) == {"truncated_sampling": 12}


def test_a_not_same_tokens_is_named(plain):
    """logits[t] taken for token t, the usual slip of a training loop, in either direction."""
    _, inference, train = plain
    assert faulty(train[:, 1:], inference[:, :-1]) == {"not_same_tokens": 12}
    assert faulty(train[:, :-1], inference[:, 1:]) == {"not_same_tokens": 12}


def test_a_prompt_that_was_encoded_again_is_named(plain, training, asked):
    """Prompts sampled as ids, decoded and encoded again: other ids, other prefixes, and drift that is none."""
    model, tokenizer = training
    tokens, inference, _ = plain
    # What a turn of a conversation looks like: the ids of an earlier answer, which no encoder would have chosen.
    turns = [[*ids, *row[:32].tolist()] for ids, row in zip(asked, tokens, strict=True)]
    again = [tokenizer(tokenizer.decode(ids))["input_ids"] for ids in turns]
    other = np.array([left != right for left, right in zip(turns, again, strict=True)])
    assert other.sum() >= 8
    rest = [row[32:] for row in tokens]
    train = np.array(hf_scorer(model)(again, rest))
    assert drift(train[other], inference[other, 32:]) > 0.01
    assert faulty(train, inference[:, 32:], prompt_ids=(again, turns))["prompt_mismatch"] == other.sum()
    assert faulty(np.array(hf_scorer(model)(turns, rest)), inference[:, 32:], prompt_ids=(turns, turns)) == {}


def test_sides_with_other_prompts_never_become_a_pair(plain, asked):
    """Handed over apart, sequences are named by prompt and tokens: other prompts wait, and no drift is made of them."""
    tokens, inference, train = plain
    again = [[*ids[:-1], 3] for ids in asked]
    with Recorder(contract(), sampling=1.0, metric_exporter=Memory()) as recorder:
        recorder.sampled(token_ids=tokens, logprobs=inference, prompt_ids=asked)
        recorder.scored(token_ids=tokens, logprobs=train, prompt_ids=again)
        assert recorder.force_flush()
        assert (recorder.stats().sequences, recorder.stats().unpaired) == (0, 24)


def test_other_tokens_are_named(plain, training):
    """An answer that was decoded and encoded again has other ids, or another number of them."""
    tokens, inference, train = plain
    tokenizer = training[1]
    again = [tokenizer(tokenizer.decode(row))["input_ids"] for row in tokens]
    other = np.full(tokens.shape, -1)
    for row, ids in enumerate(again):
        other[row, : len(ids)] = ids[: tokens.shape[1]]
    differing = int((other != tokens).any(1).sum())
    assert differing >= 8
    assert faulty(train, inference, train_token_ids=other, inference_token_ids=tokens) == {"token_mismatch": differing}


def test_padding_that_counts_is_named_and_masked_padding_is_not(plain, training, asked):
    """Answers of different lengths, padded: training scores the padding, the engine's buffer holds a filler there."""
    model, tokenizer = training
    tokens, inference, _ = plain
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    lengths = np.linspace(40, 72, len(tokens)).astype(int)
    mask = np.arange(TOKENS) < lengths[:, None]
    padded = np.where(mask, tokens, pad)
    train = np.array(hf_scorer(model)(asked, list(padded)))
    buffer = np.where(mask, inference, 0.0)
    assert faulty(train, buffer) == {"placeholder": 12}
    assert faulty(train, buffer, mask=mask) == {}


@pytest.mark.parametrize(("filler", "reason"), [(0.0, "placeholder"), (math.nan, "nan_logprob")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_buffer_that_nobody_wrote_is_named(plain, filler, reason, side):
    """Log-probs that were never turned on, or never arrived."""
    tokens, inference, train = plain
    sides = [train.copy(), inference.copy()]
    sides[side][3:5] = filler
    assert faulty(*sides, train_token_ids=tokens, inference_token_ids=tokens) == {reason: 2}


def moved(model):
    """The model a few optimizer steps later."""
    import copy

    import torch

    later = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(later.parameters(), lr=1e-3)
    ids = torch.arange(64).reshape(4, 16) + 5
    for _ in range(2):
        later(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return later.eval()


def test_stale_weights_are_a_lag_and_drift_not_a_fault(plain, training, asked):
    """The engine missed two updates: the drift is real, so it is measured, and the lag says where it comes from."""
    tokens, inference, _ = plain
    train = np.array(hf_scorer(moved(training[0]))(asked, list(tokens)))
    assert faulty(train, inference) == {}
    assert drift(train, inference) > 0.05
    exporter = Memory()
    with Recorder(contract(), sampling=1.0, metric_exporter=exporter) as recorder:
        recorder.compare(train, inference, weights=(12, 10))
        assert recorder.force_flush()
        assert recorder.stats().sequences == len(tokens)
    assert [point.max for point in exporter.points("kc.weights.lag")] == [2.0]


def test_other_weights_are_named(plain, asked):
    """A checkpoint's name that differs is no comparison; a step that differs is a lag."""
    tokens, inference, _ = plain

    def served(weights):
        return SampledRequest(
            request_id="r",
            prompt_ids=np.array(asked[0]),
            token_ids=tokens[0],
            logprobs=inference[0].astype(np.float32),
            kernel=Kernel("vllm"),
            processing={"temperature": 1.0},
            weights=weights,
        )

    assert refusal(served("step-3"), "final")[0] == "wrong_weights"
    assert refusal(served("final"), "final") is None
    assert refusal(served(3), 4) is None


def test_kernel_versions_mixed_in_one_batch_are_kept_apart(tiny_model, plain, training, asked):
    """Requests of two engines, scored in one go, end in a stream each: bf16's drift is not averaged with float32's."""
    tokens, inference, train = plain
    processing = {"temperature": 1.0}
    ((other_tokens, other),) = rolled_out(tiny_model, asked, "processed_logprobs", processing, dtype="bfloat16")
    other_train = np.array(hf_scorer(training[0])(asked, list(other_tokens)))
    assert faulty(other_train, other) == {}
    exporter = Memory()
    kernels = {dtype: Kernel("vllm", dtype=dtype) for dtype in ("float32", "bfloat16")}
    with Recorder(contract(), sampling=1.0, metric_exporter=exporter) as recorder:
        for dtype, ids, logprobs in (("float32", tokens, inference), ("bfloat16", other_tokens, other)):
            recorder.rollout(inference=kernels[dtype])
            recorder.sampled(token_ids=ids, logprobs=logprobs, prompt_ids=asked)
        mixed = [*zip(asked, tokens, train, strict=True), *zip(asked, other_tokens, other_train, strict=True)]
        order = np.random.default_rng(0).permutation(len(mixed))
        batch = [mixed[i] for i in order]
        recorder.scored(
            token_ids=np.array([row for _, row, _ in batch]),
            logprobs=np.array([scores for _, _, scores in batch]),
            prompt_ids=[ids for ids, _, _ in batch],
        )
        assert recorder.force_flush()
    means = {
        dtype: [
            point.sum / point.count for point in exporter.points("kc.drift.abs_log_ratio", kernel=kernel.fingerprint)
        ]
        for dtype, kernel in kernels.items()
    }
    assert means["float32"][0] < 2e-5
    assert means["bfloat16"][0] > 1e-3


def test_every_name_is_in_the_table():
    """What the checks can find has words for the person who reads it at night."""
    from kc_otel.contract.input_reasons import REASONS

    assert {reason.name.lower() for reason in InvalidReason} - {"valid"} <= set(REASONS)
