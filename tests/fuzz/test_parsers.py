"""Whatever bytes come, every parser reads them or refuses them with its own error, and each is on the list."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS, SEEDS

NASTY = [
    b"\x00", b"\xff", b"\n", b"\xed\xa0\x80", b"\\ud800", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"-1", b"1e999",
    b"NaN", b"null", b"&a [*a]", b"!!python/object:os.system {}", b"\xf0\x9f\x98\x80", b"\x7f\xff\xff\xff",
]  # fmt: skip


@st.composite
def mutated(draw, seeds):
    """A seed with some of it cut out, doubled, or replaced; or any bytes at all."""
    body = draw(st.sampled_from(seeds) if seeds else st.binary(max_size=200))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(body)))
        end = min(start + draw(st.integers(0, 20)), len(body))
        put = draw(st.one_of(st.binary(max_size=8), st.sampled_from(NASTY), st.just(body[start:end] * 2)))
        body = body[:start] + put + body[end:]
    return body


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_any_bytes_are_read_or_refused(name):
    """No parser raises what it does not document, whatever somebody sends it."""

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(body=mutated(SEEDS.get(name, [])))
    def parse(body):
        PARSERS[name](body)

    parse()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_what_is_nasty_to_parsers_in_general_is_read_or_refused(name):
    """Nesting, numbers without an end, half a character, an alias of itself: alone, and amid what is right."""
    for seed in SEEDS.get(name, [b""]):
        for nasty in NASTY:
            for at in (0, len(seed) // 2, len(seed)):
                PARSERS[name](seed[:at] + nasty + seed[at:])
        PARSERS[name](seed)
