"""Teacher-forced scoring with a Hugging Face model, against its own whole forward, sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.tiny_model import prompts
from kc_otel.recordings.scoring import hf_scorer
from tests.engines._vllm import offline_engine, sampled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded(tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_model).train(), AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def sequences(loaded):
    """Prompts and continuations of very different lengths."""
    _, tokenizer = loaded
    ids = [tokenizer(text)["input_ids"] for text in prompts("code", 6, characters=90)]
    cuts = [1, 3, 9, 5, 20, 2]
    return [row[:cut] for row, cut in zip(ids, cuts, strict=True)], [
        row[cut : cut + 4 * (i + 1)] for i, (row, cut) in enumerate(zip(ids, cuts, strict=True))
    ]


def alone(model, prompt, tokens):
    """log-probs of one sequence from its whole logits."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0].float()
    model.train()
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()


def test_a_batch_of_all_lengths_scores_as_each_sequence_alone(loaded, sequences):
    model, _ = loaded
    model.model.layers[0].eval()
    found = hf_scorer(model)(*sequences)
    assert model.training
    assert not model.model.layers[0].training
    model.train()
    for scored, prompt, tokens in zip(found, *sequences, strict=True):
        assert scored.dtype == np.float32
        np.testing.assert_allclose(scored, alone(model, prompt, tokens), atol=2e-5)


def test_the_cut_into_forwards_changes_nothing(loaded, sequences):
    model, _ = loaded
    sizes = []
    handle = model.register_forward_hook(lambda *args: sizes.append(args[-1].logits.numel()))
    budget = 60 * model.config.vocab_size
    small = hf_scorer(model, max_logits=budget)(*sequences)
    whole = hf_scorer(model)(*sequences)
    handle.remove()
    assert len(sizes) > 2
    assert max(sizes[:-1]) <= budget
    for a, b in zip(small, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_autocast_is_the_scorers_and_not_the_callers(loaded, sequences):
    """A scorer without autocast is not changed by a region around it; one with bfloat16 differs by its rounding."""
    model, _ = loaded
    plain = hf_scorer(model)(*sequences)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = hf_scorer(model)(*sequences)
    for a, b in zip(plain, inside, strict=True):
        np.testing.assert_array_equal(a, b)
    rounded = np.concatenate(hf_scorer(model, autocast=torch.bfloat16)(*sequences))
    difference = np.abs(rounded - np.concatenate(plain))
    assert 1e-4 < difference.mean() < 0.1


def test_vllm_reports_the_same_after_temperature_and_truncation(loaded, tiny_model):
    model, tokenizer = loaded
    asked = [tokenizer(text)["input_ids"] for text in prompts("prose", 6, characters=60)]
    with offline_engine(tiny_model, dtype="float32", max_model_len=256, logprobs_mode="processed_logprobs") as llm:
        for processing in (
            {"temperature": 0.7},
            {"temperature": 1.3, "top_k": 20},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.2, "top_p": 0.85, "top_k": 30, "min_p": 0.02},
        ):
            tokens, reported = sampled(llm, asked, max_tokens=40, **processing)
            scored = np.concatenate(hf_scorer(model)(asked, tokens, processing))
            difference = np.abs(scored - np.concatenate(reported))
            # By rounding a token at the edge of the nucleus may be in on one side alone, which moves the others' share.
            assert np.quantile(difference, 0.98) < 1e-3, processing
