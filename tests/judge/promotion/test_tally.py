"""Windows are counted once, however often they are looked at, and whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.promotion.stages import Tally


def test_windows_that_share_data_count_once():
    """Looked at every second, ten minutes are two windows of five, not six hundred."""
    tally = Tally()
    for at in range(300, 901):
        tally = tally.after_pass(at, 300, 300)
    assert (tally.passed, tally.pass_from) == (3, 900)


def test_a_clock_that_was_set_back_starts_the_streak_again():
    """Nobody knows which data are new: what counts from there on is what comes after the new time."""
    tally = Tally().after_pass(1000, 300, 300).after_pass(1300, 300, 300)
    back = tally.after_pass(900, 300, 300)
    assert (back.passed, back.pass_from) == (0, 900)
    assert back.after_pass(1100, 300, 300).passed == 0
    assert back.after_pass(1100, 300, 300).after_pass(1200, 300, 300).passed == 1


def test_silence_and_doubt_end_a_streak_and_silence_of_any_length_may_be_allowed():
    """A gap longer than a window starts over, in a stage that has a clock."""
    tally = Tally().after_pass(300, 300, 300)
    assert tally.after_pass(601, 300, 300).passed == 1
    assert tally.after_pass(601, 300, 0).passed == 2
    assert tally.after_doubt(310).after_pass(600, 300, 300).passed == 1


def test_failing_windows_count_once_and_end_the_streak():
    """Two looks at one bad minute are one failing window; what lies before a given time is none."""
    tally = Tally(fail_from=100.0).after_pass(110, 60, 60).after_fail(120, 60)
    assert (tally.passed, tally.failed) == (0, 0)
    assert tally.after_fail(160, 60).failed == 1
    assert tally.after_fail(160, 60).after_fail(219, 60).failed == 1
    assert tally.after_fail(160, 60).after_fail(220, 60).failed == 2


def test_it_survives_json():
    """As it is kept between two ticks."""
    tally = Tally(pass_from=0.0).after_pass(300, 300, 300).after_fail(310, 300)
    assert read_json(Tally, to_json(tally)) == tally


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(30, 120)), max_size=14), st.integers(0, 200))
def test_it_counts_the_most_windows_that_share_no_data(looks, since):
    """Never more than could be chosen one after the other, and never fewer, from data after a given time."""
    tally, at, ends = Tally(pass_from=since), 0, []
    for step, span in looks:
        at += step
        tally = tally.after_pass(at, span, 0)
        ends.append((at - span, at))

    def most(start, left):
        return max((1 + most(b, left[n + 1 :]) for n, (a, b) in enumerate(left) if a >= start), default=0)

    assert tally.passed == most(since, ends)
