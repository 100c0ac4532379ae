from __future__ import annotations

import random
import subprocess
import sys
from enum import StrEnum

import numpy as np
import pytest

from kc_otel.record.sampling import Sampler, position_of


def test_the_share_of_keys_is_what_was_asked_for():
    sampler = Sampler(0.2)
    assert abs(sum(sampler.takes(f"request-{i}") for i in range(20_000)) / 20_000 - 0.2) < 0.015
    assert abs(sum(sampler.takes() for _ in range(20_000)) / 20_000 - 0.2) < 0.015


def test_a_key_is_decided_alike_everywhere():
    """The same key has the same place in another process, so both sides of a pair take the same sequences."""
    code = "from kc_otel.record.sampling import position_of; print(position_of('request-7'), position_of((1, 'a')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(position_of("request-7")), str(position_of((1, "a")))]


def test_a_larger_share_takes_what_a_smaller_one_took():
    keys = [str(i) for i in range(2000)]
    few = {key for key in keys if Sampler(0.1).takes(key)}
    assert few < {key for key in keys if Sampler(0.4).takes(key)}


@pytest.mark.parametrize(("share", "taken"), [(0.0, 0), (1.0, 100), (1, 100)])
def test_none_and_all(share, taken):
    assert sum(Sampler(share).takes() for _ in range(100)) == taken


def test_it_draws_nothing_from_the_program():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    Sampler(0.5).takes()
    assert random.random() == expected


class _Text(StrEnum):
    CODE = "code-7"


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (np.int64(7), 7),
        (np.str_("code-7"), "code-7"),
        (_Text.CODE, "code-7"),
        (7.0, 7),
        (("a", np.int32(3), (np.str_("b"),)), ("a", 3, ("b",))),
    ],
)
def test_keys_that_are_equal_are_decided_alike(key, other):
    assert key == other
    assert position_of(key) == position_of(other)
