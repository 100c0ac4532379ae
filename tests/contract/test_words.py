"""Numbers, spans of time and names, as sentences have them."""

import pytest

from kc_otel.contract import words


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.number(0.12345), "0.123"),
        (words.number(-0.0), "0"),
        (words.number(None), "-"),
        (words.rounded(0.0707106), "0.0707"),
        (words.rounded(4.8828125e-06), "4.88e-06"),
        (words.rounded(16384.2), "16,384"),
        (words.rounded_down(0.003125), "0.00312"),
        (words.rounded_down(0.05), "0.05"),
        (words.with_unit("0.15", "{nat}"), "0.15 nat"),
        (words.with_unit("2", "{step}"), "2 steps"),
        (words.with_unit("0.004", "1"), "0.004"),
        (words.duration(42), "42 s"),
        (words.duration(90000), "1 d 1 h"),
        (words.interval(0.1, None), "0.1 to unbounded"),
        (words.interval(None, None), "-"),
        (words.moment(0), "1970-01-01 00:00:00 UTC"),
        (words.place("all"), "all traffic"),
        (words.listed(["a", "b"]), "a and b"),
        (words.listed(["a", "b", "c", "d", "e"]), "a, b, c and 2 more"),
    ],
)
def test_what_is_written_reads_alike_everywhere(said: str, expected: str) -> None:
    assert said == expected
