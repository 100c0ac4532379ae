"""The bounded worker: nobody who puts something waits or fails, and everything left out is counted."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from kc_otel.record import work
from kc_otel.record.worker import BoundedWorker, ReasonCounts
from tests.tools.waiting import NOT_HUNG, eventually


@pytest.fixture
def workers():
    made = []

    def make(handle=lambda _: None, max_bytes=100, **options):
        counts = options.pop("counts", None) or ReasonCounts("test: left out (%s)")
        made.append((BoundedWorker(handle, counts.add, name="test-worker", max_bytes=max_bytes, **options), counts))
        return made[-1]

    yield make
    for worker, _ in made:
        worker.close(1.0)


class Held:
    """A handler that keeps what it is given, and waits until it may go on."""

    def __init__(self):
        self.taken, self.begun, self.release = [], threading.Event(), threading.Event()

    def __call__(self, items):
        self.begun.set()
        self.release.wait(120)
        self.taken += items


def test_items_are_handled_in_order_on_a_thread_of_its_own(workers):
    seen = []
    threads = threading.active_count()
    worker, counts = workers(lambda items: seen.extend((item, threading.current_thread()) for item in items))
    assert threading.active_count() == threads
    for number in range(20):
        assert worker.put(lambda number=number: number, 1)
    assert worker.flush(60)
    assert [item for item, _ in seen] == list(range(20))
    (thread,) = {thread for _, thread in seen}
    assert (thread.name, thread.daemon) == ("test-worker", True)
    assert counts.values() == {}


def test_overload_is_bounded_by_bytes_until_they_are_handled(workers):
    """What is being handled still counts, what does not fit is not even made, and put returns at once."""
    held = Held()
    worker, counts = workers(held, max_bytes=10)
    assert worker.put(lambda: "a", 6)
    assert held.begun.wait(60)
    made = []
    began = time.monotonic()
    assert not worker.put(lambda: made.append(1), 5)
    assert worker.put(lambda: "b", 4)
    assert time.monotonic() - began < NOT_HUNG
    assert (made, worker.depth(), counts.values()) == ([], (2, 10), {"queue-full": 1})
    held.release.set()
    assert worker.flush(60)
    assert worker.put(lambda: "c", 10)
    assert worker.flush(60)
    assert (held.taken, worker.depth()) == (["a", "b", "c"], (0, 0))


def test_overload_is_bounded_by_number_too(workers, monkeypatch):
    """Small items cannot pile up without end; a message of no bytes always gets through."""
    held = Held()
    monkeypatch.setattr("kc_otel.record.worker._MAX_ITEMS", 2)
    worker, counts = workers(held)
    assert [worker.put(lambda: "x", 1) for _ in range(4)] == [True, True, False, False]
    assert worker.put(lambda: "message", 0)
    held.release.set()
    assert worker.flush(60)
    assert held.taken == ["x", "x", "message"]
    assert counts.values() == {"queue-full": 2}


def test_an_item_that_cannot_be_made_costs_nobody_anything(workers):
    """A copy that fails is counted, and its room goes to others; what is no Exception is the caller's."""
    worker, counts = workers(max_bytes=10)

    def fail():
        raise ValueError("no copy")

    def stop():
        raise KeyboardInterrupt

    assert not worker.put(fail, 10)
    with pytest.raises(KeyboardInterrupt):
        worker.put(stop, 10)
    assert counts.values() == {"capture-failed": 1}
    assert worker.put(lambda: "x", 10)


def test_batches_are_of_what_waits(workers):
    """At most so many at once, none of them twice, and one that fails counts for all of its items."""
    held, batches = Held(), []

    def handle(items):
        held(items)
        batches.append(len(items))
        if len(batches) == 3:
            raise ValueError("the whole batch")

    worker, counts = workers(handle, batch=4)
    worker.put(lambda: 0, 1)
    assert held.begun.wait(60)
    for number in range(1, 8):
        worker.put(lambda number=number: number, 1)
    held.release.set()
    assert worker.flush(60)
    assert (batches, held.taken) == ([1, 4, 3], list(range(8)))
    assert counts.values() == {"failed": 3}
    assert worker.depth() == (0, 0)


def test_flush_waits_for_what_was_there_and_not_for_what_comes(workers):
    """A producer that never stops does not keep flush from returning."""
    worker, _ = workers(lambda _: time.sleep(0.0002))
    stop = threading.Event()

    def produce():
        while not stop.is_set():
            worker.put(lambda: "x", 1)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        assert worker.flush(60)
    finally:
        stop.set()
        thread.join()


def test_nothing_is_lost_or_counted_twice_when_many_put_while_one_closes(workers):
    for _ in range(20):
        seen = []
        worker, counts = workers(seen.extend, max_bytes=1_000)
        start = threading.Barrier(5)

        def produce(name, worker=worker, start=start):
            start.wait()
            for number in range(50):
                worker.put(lambda number=number: (name, number), 1)

        threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        start.wait()
        assert worker.close(60)
        for thread in threads:
            thread.join()
        assert len(seen) == len(set(seen))
        assert len(seen) + sum(counts.values().values()) == 200
        assert worker.depth() == (0, 0)


def test_an_item_that_is_being_made_while_it_closes_is_still_handled(workers):
    seen, making, go = [], threading.Event(), threading.Event()
    worker, counts = workers(seen.extend)

    def slow():
        making.set()
        go.wait(120)
        return "slow"

    thread = threading.Thread(target=lambda: worker.put(slow, 1))
    thread.start()
    assert making.wait(60)
    found = []
    closing = threading.Thread(target=lambda: found.append((worker.close(60), list(seen))))
    closing.start()
    eventually(lambda: not worker.open)
    go.set()
    thread.join()
    closing.join()
    assert (found, counts.values()) == ([(True, ["slow"])], {})


def test_the_handler_is_woken_where_it_asks_for_it(workers):
    """With nothing to handle it is called with nothing, as long as somebody waits for that."""
    calls = []
    worker, _ = workers(calls.append, wake=lambda: 0.01 if len(calls) < 3 else None)
    worker.put(lambda: "x", 1)
    eventually(lambda: len(calls) >= 3)
    time.sleep(0.05)
    assert calls == [["x"], [], []]


def test_a_forked_child_begins_with_an_empty_queue_and_a_thread_of_its_own(workers):
    """Even when the parent's thread was at work and its locks were held; what it queued is handled by it alone."""
    held = Held()
    worker, counts = workers(held)
    for item in "ab":
        worker.put(lambda item=item: item, 1)
    counts.add("failed", "in the parent")
    assert held.begun.wait(60)
    with worker._changed, counts._lock:
        child = os.fork()
    if child == 0:
        held.release = threading.Event()
        held.release.set()
        ok = worker.depth() == (0, 0) and counts.values() == {}
        ok = ok and worker.put(lambda: "child", 1) and worker.flush(60) and held.taken == ["child"]
        os._exit(0 if ok and worker.close(60) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.depth()[0] == 2
    held.release.set()
    assert worker.flush(60)
    assert held.taken == ["a", "b"]
    assert counts.values() == {"failed": 1}


def test_a_thread_that_cannot_be_started_is_a_drop(workers, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    worker, counts = workers()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not worker.put(lambda: "x", 1)
    assert counts.values() == {"failed": 1}
    assert worker.close(0.0)


def test_a_thread_that_measures_on_a_gpu_leaves_captures_alone(monkeypatch):
    """It asks the driver for relaxed mode, once, so that what it allocates does not break another thread's capture."""
    modes = []
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: modes.append(mode._obj.value))
    monkeypatch.setattr(work.ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(work, "_thread", SimpleNamespace())
    for _ in range(2):
        work._allow_captures()
    assert modes == [2]
    monkeypatch.setattr(work, "_thread", SimpleNamespace())
    monkeypatch.setattr(work.ctypes, "CDLL", lambda _: SimpleNamespace())
    work._allow_captures()
