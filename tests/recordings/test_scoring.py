"""Processing of logits, and scorers of models that are not from Hugging Face."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.recordings import scoring
from kc_otel.recordings.request import KeptTokens
from kc_otel.recordings.scoring import hf_scorer, kept_mass, sampled_logprobs

VOCABULARY = 23


def logits(seed, rows=7, vocabulary=VOCABULARY):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def everything(values, processing):
    """Log-probabilities of the whole vocabulary, a token at a time: [positions, vocabulary]."""
    rows, vocabulary = values.shape
    ids = torch.arange(vocabulary).repeat(rows)
    return sampled_logprobs(values.repeat_interleave(vocabulary, 0), ids, processing).view(rows, vocabulary)


@pytest.mark.slow
@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(1, VOCABULARY + 3),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_processed_log_probs_are_those_of_a_distribution_over_what_is_left(seed, temperature, top_k, top_p, min_p):
    values = logits(seed)
    found = everything(values, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}).double()
    assert torch.allclose(found.exp().sum(1), torch.ones(len(values), dtype=torch.double), atol=1e-5)
    for row, got in zip((values.double() / temperature).softmax(1), found, strict=True):
        kept = row >= min_p * row.max()
        kept &= row >= row[kept].sort(descending=True).values[:top_k][-1]
        ordered = (row * kept / row[kept].sum()).sort(descending=True)
        before = ordered.values.cumsum(0) - ordered.values
        edge = (before - top_p).abs() < 1e-5  # which side of the nucleus' edge rounding puts a token on is open
        inside = torch.zeros_like(kept).scatter(0, ordered.indices, before < top_p) & kept
        settled = ~torch.zeros_like(kept).scatter(0, ordered.indices, edge)
        assert torch.equal((got > -np.inf)[settled], inside[settled])


@pytest.mark.parametrize("block", [1, VOCABULARY * 3, 1 << 22])
def test_the_mass_of_the_kept_tokens_is_that_of_the_whole_vocabulary_over_them(monkeypatch, block):
    monkeypatch.setattr(scoring, "_LOGITS_PER_BLOCK", block)
    values, rng = logits(5), np.random.default_rng(0)
    sets = [rng.choice(VOCABULARY, count, replace=False) for count in (3, 1, 0, 23, 5, 2, 7)]
    kept = KeptTokens(np.concatenate(sets), np.array([members.size for members in sets]))
    found = kept_mass(values.bfloat16(), kept, {"temperature": 0.7}).exp().numpy()
    whole = (values.bfloat16().double() / 0.7).softmax(1).numpy()
    assert found == pytest.approx([row[ids].sum() for row, ids in zip(whole, sets, strict=True)], rel=1e-5)
    with pytest.raises(ValueError, match="7 sets of tokens for 6 positions"):
        kept_mass(values[:6], kept)


def test_the_smallest_nucleus_holds_the_most_likely_token():
    """A top-p that rounds to nothing leaves one token, which is certain."""
    values = logits(2)
    assert torch.equal(sampled_logprobs(values, values.argmax(1), {"top_p": 1e-9}), torch.zeros(7))


def test_blocks_and_neutral_processing_change_nothing(monkeypatch):
    values, ids = logits(0, 50), torch.arange(50) % VOCABULARY
    whole = sampled_logprobs(values, ids)
    monkeypatch.setattr(scoring, "_LOGITS_PER_BLOCK", 3 * VOCABULARY)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    for processing in (None, neutral):
        assert torch.equal(sampled_logprobs(values, ids, processing), whole)
    assert torch.allclose(whole, values.log_softmax(1).gather(1, ids[:, None])[:, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("processing", "message"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 cannot be applied here"),
        ({"temperature": 0}, "temperature=0 samples nothing"),
        ({"top_p": "0.9"}, "top_p='0.9' is not a number"),
    ],
)
def test_processing_that_cannot_be_applied_is_refused(processing, message):
    with pytest.raises(ValueError, match=message):
        sampled_logprobs(logits(0), torch.zeros(7, dtype=torch.int64), processing)


class Bigram(torch.nn.Module):
    """Predicts the next token from the last one; knows neither `logits_to_keep` nor a configuration."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(logits(3, VOCABULARY))

    def forward(self, input_ids, attention_mask, use_cache):
        assert not use_cache
        assert attention_mask.shape == input_ids.shape
        return type("Output", (), {"logits": self.table[input_ids]})


def test_any_module_with_logits_can_be_scored():
    model = Bigram()
    prompt, tokens = [[1], [2, 3, 4], [5]], [[7, 8], [], [9]]
    found = hf_scorer(model)(prompt, tokens)
    table = model.table.log_softmax(1).detach().numpy()
    np.testing.assert_allclose(found[0], [table[1, 7], table[7, 8]], rtol=1e-5)
    assert found[1].shape == (0,)
    np.testing.assert_allclose(found[2], [table[5, 9]], rtol=1e-5)
    assert model.table.grad is None


def test_a_scorer_gives_the_mass_of_the_tokens_that_were_kept_beside_log_p():
    model = Bigram()
    kept = [KeptTokens(np.array([7, 8, 9, 8]), np.array([3, 1])), KeptTokens(np.array([9, 1]), np.array([2]))]
    found = hf_scorer(model)([[1], [5]], [[7, 8], [9]], {"temperature": 0.5, "top_k": 3, "top_p": 0.9}, kept)
    table = (model.table / 0.5).log_softmax(1).detach().numpy()
    np.testing.assert_allclose(found[0][0], [table[1, 7], table[7, 8]], rtol=1e-5)
    np.testing.assert_allclose(np.exp(found[0][1]), [np.exp(table[1, [7, 8, 9]]).sum(), np.exp(table[7, 8])], rtol=1e-5)
    np.testing.assert_allclose(np.exp(found[1]), [[np.exp(table[5, 9])], [np.exp(table[5, [9, 1]]).sum()]], rtol=1e-5)


def test_wrong_arguments_are_named():
    score = hf_scorer(Bigram())
    with pytest.raises(ValueError, match=r"prompt_ids\[1\]: empty"):
        score([[1], []], [[2], [3]])
    with pytest.raises(ValueError, match="token_ids: 1 sequences for 2 prompts"):
        score([[1], [2]], [[3]])
    with pytest.raises(ValueError, match="max_logits: 0"):
        hf_scorer(Bigram(), max_logits=0)
    with pytest.raises(TypeError, match="model: str"):
        hf_scorer("model")
