"""The worst sequences of each cell: which are kept, how many, how long, and what of them."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.worst_sequences import WorstSequences, read_worst
from tests.tools.contracts import contract_of

POLICY = contract_of(
    assumptions={"reward_range": [0, 1]},
    slices={"code": {"where": {"task": "code"}}},
    numerical=[{"id": "logits", "metric": "logit_half_range", "limit": 1}],
    statistical=[
        {"id": "token-tv", "metric": "tv_token", "limit": 0.02},
        {"id": "largest", "metric": "abs_log_ratio", "statistic": "max", "limit": 2},
        {"id": "reward", "metric": "reward_drift_bound", "limit": 0.1},
    ],
)
NOW = 1_000_000.0
KERNEL = Kernel("vllm", dtype="fp8")


def served(name, drift, task="code", at=NOW, kernel=KERNEL):
    """A request whose tokens the training kernel gives these log ratios, and its log P."""
    logprobs = np.full(len(drift), -3.0, dtype=np.float32)
    request = SampledRequest(
        name, np.array([11, 12]), np.arange(len(drift)), logprobs, kernel,
        attributes={"task": task}, at=int(at * 1e9), traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
    )  # fmt: skip
    return request, logprobs + np.array(drift)


@pytest.fixture
def keep(tmp_path):
    """Keeps what was served in a file, and returns a function that reads a cell of it."""
    made = []

    def keeping(*pairs, now=NOW, **options):
        kept = WorstSequences(tmp_path / "worst.sqlite", POLICY, **options)
        made.append(kept)
        kept.add([request for request, _ in pairs], [train for _, train in pairs], now)
        return lambda clause, where="all", kernel="": read_worst(
            tmp_path / "worst.sqlite", "policy", clause, where, kernel
        )

    yield keeping
    for worst in made:
        worst.close()


def test_each_clause_has_its_own_worst(keep):
    """The mean over tokens, the largest log ratio and a whole sequence's drift name different ones."""
    spike, broad, fine = [0.0] * 9 + [-3.0], [-0.2] * 10, [0.01] * 10
    cell = keep(*(served(name, drift) for name, drift in (("spike", spike), ("broad", broad), ("fine", fine))), most=2)
    assert [sequence.request_id for sequence in cell("token-tv")] == ["broad", "spike"]
    assert cell("token-tv")[0].value == pytest.approx(-np.expm1(-0.2), rel=1e-6)
    assert [sequence.request_id for sequence in cell("largest")] == ["spike", "broad"]
    assert cell("largest")[0].value == pytest.approx(3.0, rel=1e-6)
    assert [sequence.request_id for sequence in cell("reward")] == ["spike", "broad"]
    assert cell("logits") == ()


def test_a_request_that_is_scored_again_is_kept_once(keep):
    """As after an export that the evaluator refused."""
    first = served("a", [-0.2] * 10)
    keep(first, served("b", [-0.1] * 10))
    cell = keep(first)
    assert [sequence.request_id for sequence in cell("token-tv")] == ["a", "b"]


def test_a_cell_is_a_slice_and_a_kernel_and_its_number_is_bounded(keep):
    other = Kernel("vllm", dtype="bfloat16")
    rows = [served(f"r{n}", [-0.01 * n] * 4, task="code" if n % 2 else "prose") for n in range(20)]
    cell = keep(*rows, served("other", [-0.001] * 4, kernel=other), most=3)
    assert [sequence.request_id for sequence in cell("token-tv", "code", KERNEL.fingerprint)] == ["r19", "r17", "r15"]
    assert [sequence.request_id for sequence in cell("token-tv", kernel=KERNEL.fingerprint)] == ["r19", "r18", "r17"]
    assert [sequence.request_id for sequence in cell("token-tv", kernel=other.fingerprint)] == ["other"]


def test_what_is_kept_can_be_read_by_a_person(keep):
    cell = keep(served("r", [-0.5, 0.25]), text=lambda ids: "".join(f"<{token}>" for token in ids))
    (sequence,) = cell("token-tv", "code")
    assert (sequence.prompt, sequence.tokens, sequence.prompt_tokens) == ("<11><12>", ("<0>", "<1>"), 2)
    assert sequence.log_ratios == (-0.5, 0.25)
    assert (sequence.at, sequence.trace_id, sequence.prompt_hash) == (NOW, "a" * 32, "")


def test_nothing_is_kept_longer_than_it_is_said(keep):
    cell = keep(served("old", [-5.0] * 3, at=NOW))
    assert len(cell("token-tv")) == 1
    cell = keep(served("new", [-0.1] * 3, at=NOW + 90000), served("late", [-9.0] * 3, at=NOW), now=NOW + 90000)
    assert [sequence.request_id for sequence in cell("token-tv")] == ["new"]


def test_redaction_leaves_neither_prompt_nor_completion(keep, tmp_path):
    text = lambda ids: "WORDS" + "x".join(map(str, ids))  # noqa: E731 - a word that can be looked for
    cell = keep(served("a", [-0.5, -0.1]), served("b", [-0.4, -0.1]), redacted=["prompts", "completions"], text=text)
    sequence, other = cell("token-tv")
    assert sequence.prompt_hash == other.prompt_hash != ""
    assert (sequence.prompt, sequence.tokens, sequence.log_ratios) == ("", (), (-0.5, -0.1))
    held = (tmp_path / "worst.sqlite").read_bytes()
    assert b"WORDS" not in held
    path = tmp_path / "elsewhere.sqlite"
    with closing(WorstSequences(path, POLICY, redacted=["prompts"])) as elsewhere:
        elsewhere.add(*map(list, zip(served("a", [-0.5, -0.1]), strict=True)), NOW)
    (third,) = read_worst(path, "policy", "token-tv", "all", "")
    assert third.prompt_hash not in {"", sequence.prompt_hash}


@pytest.mark.parametrize("damage", [b"no database at all, but long enough", b""])
def test_a_file_of_something_else_is_refused(tmp_path, damage):
    path = tmp_path / "other"
    path.write_bytes(damage)
    with pytest.raises((OSError, ValueError), match="other: "):
        read_worst(path, "policy", "token-tv", "all", "")
    if damage:
        with pytest.raises(OSError, match="give a file of its own"):
            WorstSequences(path, POLICY)
    foreign = tmp_path / "foreign"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE a (b)")
    connection.close()
    with pytest.raises(ValueError, match="holds no worst sequences"):
        WorstSequences(foreign, POLICY)


def test_numbers_that_are_none_are_not_kept(keep):
    """A score function that returns NaN, and a request without tokens, name nobody."""
    assert keep(served("nan", [np.nan, 0.0]), served("none", []))("token-tv") == ()
