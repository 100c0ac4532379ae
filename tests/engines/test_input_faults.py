"""Input faults, planted with the real engine: each is found under its own name, and without it everything passes."""

from __future__ import annotations

import numpy as np
import pytest

from examples.tiny_model import prompts
from kc_otel import Recorder
from kc_otel.recordings.scoring import hf_scorer
from tests.engines._vllm import offline_engine, sampled
from tests.tools.contracts import contract_of
from tests.tools.memory import Memory

pytestmark = pytest.mark.slow

TOKENS = 96
WARM, NARROW = {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}


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


def rolled_out(model, asked, mode, *processings):
    """What an engine of its own samples with each processing; no engine is left when the next one starts."""
    with offline_engine(model, dtype="float32", max_model_len=256, logprobs_mode=mode) as engine:
        made = [sampled(engine, asked, max_tokens=TOKENS, ignore_eos=True, **some) for some in processings]
    return [(np.array(tokens), np.array(logprobs)) for tokens, logprobs in made]


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
    """Sequences that a recorder measures nothing of, by the reason."""
    with Recorder(contract_of(), metric_exporter=Memory()) as recorder:
        recorder.compare(train, inference, presampled=True, **options)
        assert recorder.force_flush(60.0)
        return recorder.stats().invalid


def test_without_a_fault_everything_passes_and_drift_is_rounding(plain):
    """float32 against float32: no reason anywhere, and a mean |l| of a few millionths."""
    tokens, inference, train = plain
    assert faulty(train, inference, token_ids=tokens, inference_token_ids=tokens) == {}
    assert drift(train, inference) < 2e-5


def test_temperature_and_truncation_pass_when_both_sides_have_them(rollouts, training, asked):
    score = hf_scorer(training[0])
    for key, processing in (("warm", WARM), ("narrow", NARROW)):
        tokens, inference = rollouts[key]
        train = np.array(score(asked, list(tokens), processing))
        assert faulty(train, inference) == {}
        assert np.quantile(np.abs(train - inference), 0.98) < 1e-3


@pytest.mark.parametrize(
    ("sampled_as", "scored_with", "declared", "reason", "least"),
    [
        # raw_logprobs, vLLM's default, are at temperature 1 whatever the request's: nobody declared anything.
        ("warm, raw", WARM, {}, "temperature_mismatch", 11),
        ("warm", None, {}, "temperature_mismatch", 12),
        ("warm", None, {"processing": ({"temperature": 1.0}, WARM)}, "processing_mismatch", 12),
        ("narrow", None, {}, "truncated_sampling", 12),
    ],
)
def test_processing_of_one_side_alone_is_named(
    rollouts, training, asked, sampled_as, scored_with, declared, reason, least
):
    tokens, inference = rollouts[sampled_as]
    found = faulty(np.array(hf_scorer(training[0])(asked, list(tokens), scored_with)), inference, **declared)
    assert found.pop(reason) >= least
    assert sum(found.values()) <= 12 - least
