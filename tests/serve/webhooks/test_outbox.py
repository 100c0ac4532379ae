import json
import random
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox


@pytest.fixture
def outbox(connection):
    return Outbox(connection, rng=random.Random(1))


def tell(outbox, incident, status, now=0.0, endpoint="pager"):
    body = json.dumps({"incident": incident, "status": status}).encode()
    return outbox.enqueue(endpoint, "a", body, now, group=incident, ends=status == "resolved")


def due_ids(outbox, now):
    return [message.id for message in outbox.due(now)]


def test_only_the_oldest_message_of_a_lane_is_due(outbox):
    first = outbox.enqueue("pager", "a", b"1", 0)
    second = outbox.enqueue("pager", "a", b"2", 0)
    other_contract = outbox.enqueue("pager", "b", b"3", 0)
    other_endpoint = outbox.enqueue("chat", "a", b"4", 0)
    assert due_ids(outbox, 0) == [first, other_contract, other_endpoint]
    outbox.answered(first, 0.0, 204)
    assert due_ids(outbox, 0) == [second, other_contract, other_endpoint]


@given(seed=st.integers(0, 2**32), failures=st.integers(1, 100))
def test_pause_is_random_and_bounded(seed, failures):
    connection = sqlite3.connect(":memory:", isolation_level=None)
    outbox = Outbox(connection, base=1.0, cap=60.0, rng=random.Random(seed))
    message_id = outbox.enqueue("pager", "a", b"1", 0)
    for _ in range(failures):
        outbox.answered(message_id, 0.0, 500, "HTTP 500")
    assert due_ids(outbox, min(60.0, 2.0 ** (failures - 1))) == [message_id]
    connection.close()


def test_a_message_that_expired_during_its_attempt_is_parked_even_where_it_is_not_kept(connection):
    outbox = Outbox(connection, keep=1)
    both = [outbox.enqueue("pager", "a", b"", 0) for _ in range(2)]
    outbox.expire(86_400)
    assert [message.id for message in outbox.messages()] == both[1:]
    assert {outbox.answered(message_id, 86_401.0, 500, "HTTP 500") for message_id in both} == {DeliveryState.PARKED}
    assert due_ids(outbox, 100_000) == []


def test_jitter_spreads_retries(connection):
    outbox = Outbox(connection, base=100.0, cap=100.0, rng=random.Random(7))
    ids = [outbox.enqueue("pager", str(number), b"", 0) for number in range(100)]
    for message_id in ids:
        outbox.answered(message_id, 0.0, 500, "HTTP 500")
    halfway = len(outbox.due(50.0))
    assert 30 < halfway < 70


def test_retry_after_holds_every_lane_of_the_endpoint(outbox):
    throttled = outbox.enqueue("pager", "a", b"1", 0)
    same_endpoint = outbox.enqueue("pager", "b", b"2", 0)
    elsewhere = outbox.enqueue("chat", "a", b"3", 0)
    for asked, held in ((40, 40), (31_536_000, 300)):
        outbox.answered(throttled, 0, 429, "HTTP 429", asked)
        assert due_ids(outbox, held - 1) == [elsewhere]
        assert due_ids(outbox, held) == [throttled, same_endpoint, elsewhere]


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_refused_message_is_parked_and_frees_its_lane(outbox, status):
    refused = outbox.enqueue("pager", "a", b"1", 0)
    later = outbox.enqueue("pager", "a", b"2", 0)
    assert outbox.answered(refused, 0, status, f"HTTP {status}") is DeliveryState.PARKED
    assert due_ids(outbox, 0) == [later]
    (parked,) = outbox.messages(DeliveryState.PARKED)
    assert (parked.id, parked.error) == (refused, f"HTTP {status}")


@pytest.mark.parametrize("status", [None, 301, 401, 403, 404, 408, 425, 429, 500, 502, 503])
def test_other_failures_are_tried_again(outbox, status):
    message_id = outbox.enqueue("pager", "a", b"1", 0)
    assert outbox.answered(message_id, 0, status, "failed") is DeliveryState.WAITING
    assert due_ids(outbox, 1000) == [message_id]


def test_gone_disables_the_endpoint_until_it_is_enabled(outbox):
    message_id = outbox.enqueue("pager", "a", b"1", 0)
    throttled = outbox.enqueue("pager", "b", b"1", 0)
    outbox.answered(message_id, 5, 410, "HTTP 410")
    outbox.answered(throttled, 6, 429, "HTTP 429", 1)
    outbox.answered(throttled, 7, 410, "HTTP 410")
    assert due_ids(outbox, 10_000) == []
    assert (outbox.status()[0].disabled, outbox.status()[0].disabled_at) == ("HTTP 410", 5)
    outbox.enable("pager")
    assert (outbox.status()[0].disabled, outbox.status()[0].disabled_at) == ("", None)
    assert due_ids(outbox, 10_000) == [message_id, throttled]


def test_undelivered_message_expires_visibly(outbox):
    old = outbox.enqueue("pager", "a", b"1", 0)
    young = outbox.enqueue("pager", "a", b"2", 50_000)
    outbox.answered(old, 10, 500, "HTTP 500")
    assert outbox.expire(86_399) == 0
    assert outbox.expire(86_400) == 1
    assert due_ids(outbox, 86_400) == [young]
    (parked,) = outbox.messages(DeliveryState.PARKED)
    assert parked.error == "expired undelivered; last: HTTP 500"


def test_status_shows_what_is_stuck(outbox):
    message_id = outbox.enqueue("pager", "a", b"1", 5)
    outbox.enqueue("pager", "a", b"2", 6)
    outbox.answered(outbox.enqueue("chat", "a", b"3", 7), 0.0, 204)
    outbox.answered(message_id, 8, None, "ConnectError")
    chat, pager = outbox.status()
    assert (chat.waiting, chat.oldest, chat.error) == (0, None, "")
    assert (pager.waiting, pager.parked, pager.oldest, pager.error) == (2, 0, 5, "ConnectError")
    outbox.answered(message_id, 9, 400, "HTTP 400")
    chat, pager = outbox.status()
    assert (pager.waiting, pager.parked, pager.given_up, chat.given_up) == (1, 1, 5, None)


def test_clock_that_jumps_back_does_not_delay(outbox):
    message_id = outbox.enqueue("pager", "a", b"1", 1_000_000)
    outbox.answered(message_id, 1_000_000, 503, "HTTP 503", 300)
    assert due_ids(outbox, 1_000_001) == []
    assert due_ids(outbox, 500_000) == [message_id]


def test_finished_messages_are_kept_for_a_while(connection):
    outbox = Outbox(connection, keep=3)
    waiting = outbox.enqueue("down", "a", b"", 0)
    for number in range(10):
        outbox.answered(outbox.enqueue("pager", "a", b"%d" % number, 0), 0.0, 204)
    assert [message.body for message in outbox.messages(DeliveryState.DELIVERED)] == [b"9", b"8", b"7"]
    assert due_ids(outbox, 0) == [waiting]


def test_an_endpoint_that_was_told_nothing_of_an_incident_is_not_told_of_its_end(outbox):
    """Webhooks that are switched on later, or an endpoint that was away, page nobody for what is over."""
    first = tell(outbox, "old", "firing")
    outbox.begin(first)
    outbox.answered(first, 1.0, 503, "HTTP 503")
    lasting = tell(outbox, "lasting", "firing")
    tell(outbox, "old", "firing")
    tell(outbox, "old", "resolved")
    assert due_ids(outbox, 1000) == [lasting]
    (status,) = outbox.status()
    assert (status.waiting, status.parked, status.given_up) == (1, 0, None)
    said = "3 messages to pager were not sent: it was over before any of it was delivered"
    assert outbox.undelivered("a", "old") == {"pager": (0.0, said)}
    assert [message.error for message in outbox.messages(DeliveryState.SUPERSEDED)] == ["", "", "HTTP 503"]
    outbox.answered(tell(outbox, "old", "firing"), 60.0, 204)
    said += "; a later one was accepted at 1970-01-01 00:01 UTC"
    assert outbox.undelivered("a", "old") == {"pager": (0.0, said)}, "what remained of it broke again"


def test_an_end_is_told_of_what_the_outbox_has_forgotten(outbox):
    """Only so many delivered messages are kept."""
    assert tell(outbox, "old", "resolved") in due_ids(outbox, 0.0)


@pytest.mark.parametrize("arrived", ["delivered", "unanswered", "expired", "meanwhile"])
def test_an_endpoint_that_may_have_been_told_of_an_incident_is_told_of_its_end(outbox, arrived):
    first, now = tell(outbox, "one", "firing"), 0.0
    if arrived == "delivered":
        outbox.answered(first, 1.0, 204)
    elif arrived == "meanwhile":
        outbox.begin(first)
    else:
        outbox.answered(first, 1.0, None, "ReadTimeout", arrived=True)
        if arrived == "expired":
            outbox.expire(now := 90_000.0)
    end = tell(outbox, "one", "resolved", now)
    if arrived in {"meanwhile", "unanswered"}:
        assert due_ids(outbox, now + 1000) == [first]
        outbox.answered(first, 1.0, 204)
    assert due_ids(outbox, now + 1000) == [end]
    outbox.answered(end, now, 204)
    again, _ = tell(outbox, "one", "firing"), tell(outbox, "one", "resolved")
    assert due_ids(outbox, now + 1000) == [], "it knows the first breach only"
    assert outbox.answered(again, now, 503, "HTTP 503") is DeliveryState.SUPERSEDED


def test_what_was_given_up_of_what_lasts_waits_again(outbox):
    """Neither what has expired, nor what is over or was told later, nor of another endpoint."""
    expired, lasting, over, told, other = (
        tell(outbox, incident, "firing", now, endpoint)
        for incident, now, endpoint in (
            ("expired", 0, "pager"), ("lasting", 10_000, "pager"), ("over", 10_000, "pager"), ("told", 10_000, "pager"),
            ("lasting", 10_000, "chat"),
        )
    )  # fmt: skip
    for message_id in (expired, lasting, over, told, other):
        outbox.answered(message_id, 10_000, 400, "HTTP 400")
    tell(outbox, "over", "resolved", 10_001)
    outbox.answered(tell(outbox, "told", "firing", 10_001), 10_001, 204)
    outbox.answered(tell(outbox, "ended", "firing", 10_001), 10_001, 204)
    end = tell(outbox, "ended", "resolved", 10_002)
    outbox.answered(end, 10_002, 422, "HTTP 422")
    outbox.answered(tell(outbox, "closing", "firing", 10_002), 10_002, 204)
    outbox.answered(tell(outbox, "closing", "firing", 10_002), 10_002, 400, "HTTP 400")
    closing = tell(outbox, "closing", "resolved", 10_003)
    assert due_ids(outbox, 10_003) == [closing]
    outbox.revive(["pager"], 86_400)
    assert due_ids(outbox, 86_400) == [lasting]
    outbox.answered(lasting, 86_400, 204)
    assert due_ids(outbox, 86_400) == [end], "a page that was opened is closed"
    outbox.answered(end, 86_400, 204)
    assert due_ids(outbox, 86_400) == [closing]
