"""A webhook about a clause that is judged by sequence."""

from __future__ import annotations

from kc_otel.judge.escalation.alert_lifecycle import advance
from kc_otel.judge.escalation.alerts import PolicyState
from kc_otel.judge.escalation.webhook_body import alert_body

AT = 1_700_000_000.0


def test_the_description_says_that_sequences_were_judged(make_contract, make_verdict):
    """The same metric by token and by sequence are two numbers; the person who is woken reads which one it is."""
    contract = make_contract(
        [{"on": "fail", "severity": "critical", "do": [{"webhook": "pager"}]}],
        statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "sequence", "limit": 0.004}],
    )
    _, firing = advance(contract, PolicyState(contract.name), [make_verdict("FAIL", at=AT)], {}, AT)
    (alert,) = alert_body(contract, firing, receiver="pager")["alerts"]
    assert "Mean of tv_token by sequence is 0.0123, between " in alert["annotations"]["description"]
