"""Which verdicts the traffic of a slice never decides."""

from __future__ import annotations

import pytest

from kc_otel.judge.sample_sizes import undecided_by_traffic
from tests.judge.conftest import make_contract

CLAUSES = [
    {"id": "tv", "metric": "tv_token", "limit": 0.004},
    {"id": "capped", "metric": "tv_token", "limit": 0.004, "cap": 0.02},
    {"id": "largest", "metric": "log_ratio_seq", "statistic": "max", "limit": 1},
]


def found(**traffic: float) -> dict[int, str]:
    """Messages by the number of their clause."""
    made = make_contract(statistical=CLAUSES, slices={"code": {"where": {"task": "code"}}})
    findings = undecided_by_traffic(made, traffic)
    assert {finding.level for finding in findings} <= {"warning"}
    return {int(finding.loc[1]): finding.message for finding in findings}


def test_a_pass_that_never_comes_is_told_with_what_it_takes() -> None:
    """1,200 sequences an hour do not bound a mean in [0, 1] by 0.004; its incidents end all the same."""
    said = found(code=1200)
    assert said.keys() == {0}
    assert said[0].startswith("on code no PASS is possible: it takes 1,600 prompts, and 1h has 1,200;")
    assert found(all=20_000) == {}


def test_a_fail_that_nothing_ends_is_told() -> None:
    """Of a maximum, where the traffic is below the minimum that a PASS takes."""
    said = found(code=50)
    assert "a FAIL stays forever, because only a PASS ends it for this statistic" in said[2]


@pytest.mark.parametrize(("traffic", "message"), [({"x": 1.0}, "no slice 'x'"), ({"all": 0.0}, "decide nothing")])
def test_traffic_that_is_none_is_refused(traffic: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(**traffic)
