from __future__ import annotations

import threading
import time

from kc_otel.record.worker import WorkQueue


def test_it_is_bounded_by_bytes_until_they_are_done():
    """What is being worked on still counts; room comes back with done."""
    queue = WorkQueue(10)
    assert queue.reserve(6)
    assert not queue.reserve(5)
    queue.put("a", 6)
    assert queue.get(0) == ("a", 6)
    assert not queue.reserve(5)
    queue.done(6)
    assert queue.reserve(5)


def test_room_that_is_not_used_is_given_back():
    """A copy that failed leaves its room to others, and a closed queue does not wait for it."""
    queue = WorkQueue(10)
    queue.reserve(10)
    queue.close()
    assert not queue.finished
    queue.release(10)
    assert queue.finished
    assert queue.depth() == (0, 0)


def test_drain_waits_for_what_was_there_and_not_for_what_comes():
    """A producer that never stops does not keep drain from returning."""
    queue = WorkQueue(1 << 20)
    stop = threading.Event()

    def produce():
        while not stop.is_set():
            if queue.reserve(1):
                queue.put("x", 1)
            time.sleep(0.0005)

    def consume():
        while not stop.is_set():
            if queue.get(0.01):
                queue.done(1)

    threads = [threading.Thread(target=target) for target in (produce, consume)]
    for thread in threads:
        thread.start()
    try:
        assert queue.drain(5.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_drain_keeps_its_deadline():
    """Without a worker drain gives up in time."""
    queue = WorkQueue(10)
    queue.reserve(1)
    queue.put("a", 1)
    assert not queue.drain(0.01)


def test_what_is_queued_can_be_taken_after_closing():
    """Closing refuses new items, hands out the old ones and then says that it is finished."""
    queue = WorkQueue(10)
    queue.reserve(1)
    queue.put("a", 1)
    queue.close()
    assert not queue.reserve(1)
    assert not queue.finished
    assert queue.get(None) == ("a", 1)
    assert queue.finished
    assert queue.get(None) is None
