"""The spool between serving and rescoring: nothing acknowledged is lost, and serving is never hurt."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import KeptTokens, SampledRequest, decode, encode, size_of, versions_per_token
from kc_otel.recordings.spool import Spool, SpoolError, SpoolReader
from tests.tools.small_disk import fill, small_disk

KERNEL = Kernel("vllm", version="0.32", dtype="bfloat16", extra={"block": 16})


def request(name="r", prompt=3, tokens=5, **fields):
    logprobs = -np.arange(tokens, dtype=np.float32) / 3
    return SampledRequest(name, np.arange(prompt), np.arange(tokens) + 7, logprobs, KERNEL, **fields)


def same(first, other):
    arrays = ("prompt_ids", "token_ids", "logprobs")
    plain = ("request_id", "kernel", "processing", "logprobs_mode", "attributes", "weights", "traceparent", "at")
    return all(np.array_equal(getattr(first, name), getattr(other, name)) for name in arrays) and all(
        getattr(first, name) == getattr(other, name) for name in plain
    )


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool.sqlite")
    yield made
    made.close()


scalars = st.one_of(st.text(max_size=20), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False))


@given(
    st.text(max_size=30),
    st.lists(st.integers(0, 2**31 - 1), max_size=20),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False, max_value=0)), max_size=20),
    st.dictionaries(st.text(max_size=8), scalars, max_size=4),
    st.one_of(st.none(), st.integers(), st.text(max_size=5)),
)
def test_a_request_comes_back_as_it_was(name, prompt, sampled, attributes, weights):
    tokens = np.array([token for token, _ in sampled], dtype=np.int64)
    logprobs = np.array([logprob for _, logprob in sampled], dtype=np.float32)
    before = SampledRequest(
        name, np.array(prompt, dtype=np.int64), tokens, logprobs, KERNEL, processing={"temperature": 0.7},
        attributes=attributes, weights=weights, at=5,
    )  # fmt: skip
    row = encode(before)
    assert same(before, decode(row))
    assert sum(len(part) for part in row[1:4]) <= size_of(before)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=9))
def test_what_truncation_kept_and_the_versions_of_tokens_come_back(kept):
    counts = np.array([len(tokens) for tokens in kept], dtype=np.int64)
    masks = KeptTokens(np.array([token for tokens in kept for token in tokens], dtype=np.int64), counts)
    before = replace(request(tokens=len(kept)), kept=masks, weights=((3, 0), (5, min(2, len(kept)))))
    row = encode(before)
    after = decode(row)
    np.testing.assert_array_equal(after.kept.ids, masks.ids)
    np.testing.assert_array_equal(after.kept.counts, counts)
    np.testing.assert_array_equal(versions_per_token(after), [3] * min(2, len(kept)) + [5] * (len(kept) - 2))
    assert sum(len(part) for part in row[1:]) <= size_of(before)
    assert decode(encode(request())).kept is None
    assert versions_per_token(request()) is None


def test_what_was_acknowledged_is_read_in_order(spool):
    for number in range(5):
        spool.put(request(f"r{number}", attributes={"task": "code"}))
    assert spool.flush()
    assert spool.stats().written == 5
    with SpoolReader(spool.path) as reader:
        first = reader.take(3)
        assert [stored.request_id for _, stored in first] == ["r0", "r1", "r2"]
        assert same(first[0][1], request("r0", attributes={"task": "code"}))
        assert [stored.request_id for _, stored in reader.take(3)] == ["r3", "r4"]
        reader.done([number for number, _ in first])
    with SpoolReader(spool.path) as reader:
        assert [stored.request_id for _, stored in reader.take(9)] == ["r3", "r4"]


def test_two_readers_do_not_score_the_same_requests(spool):
    spool.put(request())
    spool.flush()
    with SpoolReader(spool.path), pytest.raises(SpoolError, match="another process is rescoring this spool"):
        SpoolReader(spool.path)
    with SpoolReader(spool.path) as reader:
        assert len(reader) == 1


def test_a_full_spool_refuses_what_is_new_and_keeps_what_it_has(tmp_path):
    spool = Spool(tmp_path / "spool.sqlite", max_bytes=1 << 20)
    for number in range(400):
        spool.put(request(f"r{number}", prompt=1000))
        if number % 20 == 0:
            spool.flush()
    assert spool.flush()
    stats = spool.stats()
    assert 150 < stats.written < 300
    assert stats.dropped == {"spool-full": 400 - stats.written}
    assert spool.path.stat().st_size <= 1 << 20
    with SpoolReader(spool.path) as reader:
        taken = reader.take(1000)
        assert len(taken) == stats.written
        assert taken[0][1].request_id == "r0"
        reader.done([number for number, _ in taken])
        spool.put(request("new", prompt=1000))
        assert spool.flush()
        assert [stored.request_id for _, stored in reader.take(5)] == ["new"]
    spool.close()


def test_serving_never_waits_for_the_disk(spool):
    spool.put(request("first"))
    spool.flush()
    other = sqlite3.connect(spool.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.perf_counter()
    for number in range(100):
        spool.put(request(f"r{number}"))
    assert time.perf_counter() - started < 0.5
    assert spool.stats().waiting > 0
    other.execute("COMMIT")
    other.close()
    assert spool.flush()
    assert spool.stats().written == 101


def test_an_odd_request_does_not_cost_the_others(spool):
    odd = request("odd")
    odd.token_ids[0] = -1
    for stored in (request("a"), odd, request("b")):
        spool.put(stored)
    spool.flush()
    assert spool.stats().written == 2
    assert spool.stats().dropped == {"unwritable": 1}


def test_nobody_else_may_read_what_users_wrote(spool):
    before = os.umask(0)
    try:
        spool.put(request("a"))
        assert spool.flush()
    finally:
        os.umask(before)
    files = list(spool.path.parent.glob("spool.sqlite*"))
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_file_that_is_something_else_is_left_alone(tmp_path, caplog):
    path = tmp_path / "other.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE precious (x)")
    other.commit()
    other.close()
    spool = Spool(path)
    spool.put(request())
    assert spool.flush()
    assert spool.stats().dropped == {"spool-failed": 1}
    assert "is a database of something else" in caplog.text
    with pytest.raises(SpoolError, match="a file of its own"):
        SpoolReader(path)
    path.write_text("not a database at all, only some text that is long enough to be looked at")
    with pytest.raises(SpoolError, match="is not a spool"):
        SpoolReader(path)
    spool.close()


@pytest.mark.parametrize("look", [lambda reader: reader.take(9)[0][1].kernel, SpoolReader.kernel])
def test_a_row_that_cannot_be_read_is_removed_and_said(spool, caplog, look):
    """Also by a look at the kernel: a spool of nothing else would be called empty, and never be."""
    spool.put(request("a"))
    spool.put(request("b"))
    spool.flush()
    raw = sqlite3.connect(spool.path)
    raw.execute("UPDATE requests SET about = 'x' WHERE id = 1")
    raw.commit()
    raw.close()
    with SpoolReader(spool.path) as reader:
        assert (look(reader), len(reader)) == (KERNEL, 1)
        assert [stored.request_id for _, stored in reader.take(9)] == ["b"] * (look is SpoolReader.kernel)
    assert "request 'a' cannot be read" in caplog.text


def test_a_forked_server_keeps_requests_of_its_own(spool):
    spool.put(request("parent"))
    spool.flush()
    child = os.fork()
    if child == 0:
        spool.put(request("child"))
        os._exit(0 if spool.flush(5.0) and spool.stats().written == 1 else 1)
    spool.put(request("parent again"))
    assert os.waitpid(child, 0)[1] == 0
    spool.flush()
    with SpoolReader(spool.path) as reader:
        assert {stored.request_id for _, stored in reader.take(9)} == {"parent", "child", "parent again"}


WRITER = textwrap.dedent(
    """
    import sys
    sys.path[:0] = {path!r}
    from test_spool import request
    from kc_otel.recordings.spool import Spool
    spool = Spool(sys.argv[1], max_bytes=1 << 30)
    number = 0
    while True:
        for _ in range(10):
            spool.put(request(f"r{{number}}", prompt=300))
            number += 1
        spool.flush()
        stats = spool.stats()
        print(stats.written, sum(stats.dropped.values()), flush=True)
    """
)


def writer(path):
    """A process that writes as fast as it can and says how much was acknowledged."""
    source = WRITER.format(path=[str(Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", source, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_what_was_acknowledged_survives_kill_9(tmp_path):
    """Killed at any instant, the file holds everything that was said to be written, in order, and can be read."""
    path = tmp_path / "spool.sqlite"
    acknowledged = 0
    for round in range(3):
        process = writer(path)
        for _ in range(5 + 7 * round):
            line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.wait()
        process.stdout.close()
        last = next((text for text in reversed(rest) if text.count(" ") == 1 and text[-1].isdigit()), line)
        acknowledged += int(last.split()[0])
        with SpoolReader(path) as reader:
            assert len(reader) >= acknowledged
            assert len(reader.take(10**6)) == len(reader)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 2 MiB; only root may have one."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def test_a_file_system_that_is_full_is_said_and_goes_on_when_there_is_room(disk, caplog):
    spool = Spool(disk / "spool.sqlite", max_bytes=1 << 30)
    try:
        spool.put(request("first", prompt=300))
        assert spool.flush()
        filler = fill(disk)
        for number in range(60):
            spool.put(request(f"r{number}", prompt=3000))
            assert spool.flush()
        full = spool.stats()
        assert full.dropped == {"spool-full": 61 - full.written}
        assert full.dropped["spool-full"] > 30
        (said,) = [message for message in caplog.messages if "spool-full" in message]
        assert str(spool.path) in said
        assert "disk is full" in said
        filler.unlink()
        spool.put(request("last", prompt=300))
        assert spool.flush()
        assert spool.stats().written == full.written + 1
    finally:
        spool.close()
    with SpoolReader(spool.path) as reader:
        names = [stored.request_id for _, stored in reader.take(1000)]
    assert (names[0], names[-1], len(names)) == ("first", "last", full.written + 1)


def test_a_spool_that_begins_on_a_full_file_system_is_said(disk, caplog):
    """Also where there is no room for the file itself, serving goes on, and the reason is the disk."""
    filler = fill(disk)
    spool = Spool(disk / "spool.sqlite")
    try:
        spool.put(request("first"))
        assert spool.flush()
        assert spool.stats().dropped == {"spool-full": 1}
        assert any("full" in message for message in caplog.messages)
        filler.unlink()
        spool.put(request("second"))
        assert spool.flush()
        assert spool.stats().written == 1
    finally:
        spool.close()


def bytes_of(spool):
    return b"".join(path.read_bytes() for path in spool.path.parent.glob(f"{spool.path.name}*"))


def test_what_was_confirmed_is_in_no_file_any_more(spool):
    spool.put(request("first", attributes={"secret": "what-somebody-asked"}))
    spool.put(request("second", attributes={"other": "not-yet-scored"}))
    assert spool.flush()
    assert b"what-somebody-asked" in bytes_of(spool)
    with SpoolReader(spool.path) as reader:
        reader.done([reader.take(1)[0][0]])
        left = bytes_of(spool)
    assert b"not-yet-scored" in left
    assert b"what-somebody-asked" not in left


def test_what_nobody_scores_does_not_stay_for_ever(tmp_path, caplog):
    """Older than the spool's age is removed and told of; what is younger, or says no time, stays."""
    now = time.time_ns()
    first = Spool(tmp_path / "spool.sqlite")
    for name, at in (("old", now - 7200 * 10**9), ("timeless", 0), ("young", now)):
        first.put(request(name, at=at, attributes={"who": f"{name}-person"}))
    assert first.flush()
    first.close()
    again = Spool(tmp_path / "spool.sqlite", max_age=3600.0)
    again.put(request("new", at=now))
    assert again.flush()
    with SpoolReader(again.path) as reader:
        assert [stored.request_id for _, stored in reader.take(9)] == ["timeless", "young", "new"]
        assert b"old-person" not in bytes_of(again)
    again.close()
    assert "1 requests were older than 1h and are removed unscored" in caplog.text
