"""Which alert of the one timeline is which of the other, by table and for timelines that nobody thought of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.offline.replay import ReplayTimeline, SentWebhook, Span, differences

EMPTY = ReplayTimeline("policy", 1, "0" * 64, 0.0, 100.0, 10, 10, {}, 1, (), (), (), ())
ALERT = Span("fail", "code", "b", 10.0, 20.0, "token-tv", "a", "fail/critical/halt/*", "critical", ("halt",), "because")


def timeline(*alerts, decisions=(), messages=()):
    return replace(EMPTY, alerts=alerts, decisions=decisions, messages=messages)


def test_an_alert_on_another_slice_or_kernel_is_another_alert():
    for other in (replace(ALERT, slice="all"), replace(ALERT, kernel_inference="c"), replace(ALERT, clause="kl")):
        found = differences(timeline(ALERT), timeline(other), apart=1e9)
        assert (found.dropped, found.added, found.moved) == ((ALERT,), (other,), ())


def test_the_nearest_of_several_is_the_same():
    three = [replace(ALERT, start=start, end=start + 5) for start in (10.0, 20.0, 30.0)]
    near = replace(ALERT, start=21.0, end=40.0)
    found = differences(timeline(*three), timeline(near), apart=60.0)
    assert found.dropped == (three[0], three[2])
    ((pair),) = found.moved
    assert (pair.old, pair.later, pair.ends_later) == (three[1], 1.0, 15.0)


def test_the_step_that_does_the_same_goes_before_one_of_the_same_severity():
    paging = replace(ALERT, step="fail/critical/webhook:pager/*", actions=("webhook:pager",))
    late = replace(ALERT, start=15.0)
    found = differences(timeline(ALERT, paging), timeline(replace(paging, start=12.0), late), apart=60.0)
    assert {(pair.old.step, pair.later) for pair in found.moved} == {(ALERT.step, 5.0), (paging.step, 2.0)}


def test_a_severity_that_changes_is_a_difference_and_an_end_that_is_missing_too():
    """What never resolves any more is later by more than can be said."""
    milder = replace(ALERT, severity="warning", step="fail/warning/halt/*")
    assert differences(timeline(ALERT), timeline(milder), apart=0.0).moved[0].new == milder
    for old, new, said in ((20.0, None, math.inf), (None, 20.0, -math.inf), (None, None, 0.0)):
        found = differences(timeline(replace(ALERT, end=old)), timeline(replace(ALERT, end=new)), apart=0.0)
        assert [pair.ends_later for pair in found.moved] == ([said] if said else [])


def test_webhooks_are_compared_by_number():
    old = (SentWebhook(1.0, "pager", "firing", 2), SentWebhook(2.0, "pager", "resolved", 2))
    found = differences(timeline(messages=old), timeline(messages=(old[0], old[0], old[1])), apart=0.0)
    assert found.messages == {("pager", "firing"): (1, 2)}


spans = st.lists(
    st.builds(
        lambda step, where, start, length: replace(
            ALERT, step=step, slice=where, start=start, end=None if length is None else start + length
        ),
        st.sampled_from(["x", "y"]),
        st.sampled_from(["all", "code"]),
        st.integers(0, 300).map(float),
        st.none() | st.integers(0, 100).map(float),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=100)
@given(spans, spans, st.integers(0, 50).map(float))
def test_each_alert_is_told_of_once_and_pairs_belong_together(old, new, apart):
    """As dropped or added, as moved, or because it is the same in both; nothing is left over that could be paired."""
    found = differences(timeline(*old), timeline(*new), apart)
    same = len(old) - len(found.dropped) - len(found.moved)
    assert same == len(new) - len(found.added) - len(found.moved) >= 0
    for pair in found.moved:
        assert (pair.old.clause, pair.old.slice) == (pair.new.clause, pair.new.slice)
        assert together(pair.old, pair.new, apart)
    assert not any(
        span.slice == other.slice and together(span, other, apart) for span in found.dropped for other in found.added
    )


@pytest.mark.slow
@given(spans)
def test_a_timeline_does_not_differ_from_itself(alerts):
    assert not differences(timeline(*alerts), timeline(*alerts), apart=0.0)


def together(alert, other, apart):
    ends = [math.inf if span.end is None else span.end for span in (alert, other)]
    return max(alert.start, other.start) - min(ends) <= apart
