"""What is said of how prompts are sampled: of each kernel pair, and what is assumed where nobody names prompts."""

from __future__ import annotations

from kc_otel.judge.evaluator import Evaluator
from tests.judge.conftest import NOW, Sender, make_contract, merge


def test_it_says_what_is_assumed_and_what_is_measured() -> None:
    """Nothing before anything came, independence without prompts, rollouts and the design effect with them."""
    evaluator = Evaluator([make_contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}], slices={})])
    assert evaluator.sampling("policy") == []
    drift = Sender("kc.drift.tv_token_by_prompt")
    evaluator.ingest_metrics(drift.request(NOW, [0.01] * 10), NOW)
    (said,) = evaluator.sampling("policy")
    assert said.startswith("Assumes that sequences are independent: no recorder says which of them answer one prompt")
    rollouts, effect = Sender("kc.sampling.rollouts"), Sender("kc.sampling.design_effect")
    evaluator.ingest_metrics(merge(rollouts.request(NOW, [16, 8]), effect.request(NOW, [4.0])), NOW)
    (said,) = evaluator.sampling("policy")
    assert said == (
        "Prompts count once, with 12 rollouts on average; 4 of these are worth one independent sequence (design "
        "effect)."
    )
    evaluator.ingest_metrics(Sender("kc.drift.tv_token_by_prompt", inference="c" * 12).request(NOW, [0.01]), NOW)
    assert [said.split(" of kernel ")[1][:12] for said in evaluator.sampling("policy")] == ["b" * 12, "c" * 12]


def test_a_contract_on_sequences_assumes_what_it_says() -> None:
    """Its clauses say so themselves."""
    clause = {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.1}
    evaluator = Evaluator([make_contract(statistical=[clause], slices={})])
    evaluator.ingest_metrics(Sender("kc.drift.tv_token_by_sequence").request(NOW, [0.01] * 10), NOW)
    assert evaluator.sampling("policy") == []
