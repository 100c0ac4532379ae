"""An aggregator's state file when it is not what was written."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.forwarder import Forwarder
from kc_otel.serve.store.state_file import DamagedStateError, open_state
from tests.judge.conftest import Sender, ns
from tests.serve.store.test_state_file import damaged


def take(store: AggregatorStore, sender: Sender, now: float) -> None:
    merged = store.host.merged(sender.request(now, [0.1] * 20), ns(now))
    store.keep(merged, merged.rest.SerializeToString())


@pytest.mark.slow
def test_damage_is_said_at_the_start_or_does_no_harm(tmp_path: Path) -> None:
    """Whatever a file has become, an aggregator adds up and sends on it, or says before that it is damaged."""
    now, chance, said = time.time(), random.Random(11), 0
    sound = tmp_path / "sound"
    with closing(open_state(sound)) as connection:
        store = AggregatorStore(connection, ns(now))
        for number in range(30):
            take(store, Sender(start=now, cumulative=number % 3 > 0, instance=str(number)), now)
    content = sound.read_bytes()

    async def send(store: AggregatorStore) -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
            await Forwarder(store, "http://judge:4318", {}, client).forward()

    for number in range(500):
        path = tmp_path / str(number) / "state"
        path.parent.mkdir()
        path.write_bytes(damaged(content, chance))
        try:
            with closing(open_state(path)) as connection:
                store = AggregatorStore(connection, ns(now))
                take(store, Sender(start=now, instance="2"), now + 1)
                asyncio.run(send(store))
                store.tidy(ns(now + 90_000))
        except DamagedStateError:
            said += 1
    assert 100 < said < 500
