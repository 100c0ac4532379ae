"""Enqueues numbered messages and delivers them, as the evaluator does; killed and started again by its test.

Usage: outbox_worker.py DATABASE URL SECRET MESSAGES
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time

import httpx

from kc_otel.client.signing import Secret
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox

CONTRACTS = ("policy-7b", "reward-model")


async def main(database: str, url: str, secret: str, messages: int) -> None:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE IF NOT EXISTS progress (contract TEXT PRIMARY KEY, done INTEGER NOT NULL)")
    for contract in CONTRACTS:
        connection.execute("INSERT OR IGNORE INTO progress VALUES (?, 0)", (contract,))
    outbox = Outbox(connection, base=0.01, cap=0.05)
    dispatcher = Dispatcher(
        outbox,
        {"pager": WebhookEndpoint("pager", url, (Secret.parse(secret),), allow_private=True)},
        client_factory=lambda: httpx.AsyncClient(trust_env=False),
        poll=0.01,
    )
    delivering = asyncio.create_task(dispatcher.run())
    while True:
        connection.execute("BEGIN IMMEDIATE")
        for contract, done in connection.execute("SELECT contract, done FROM progress").fetchall():
            if done < messages:
                outbox.enqueue("pager", contract, json.dumps({"contract": contract, "n": done}).encode(), time.time())
                connection.execute("UPDATE progress SET done = done + 1 WHERE contract = ?", (contract,))
        connection.execute("COMMIT")
        dispatcher.wake()
        await asyncio.sleep(0.002)
        finished = connection.execute("SELECT min(done) FROM progress").fetchone()[0] == messages
        if finished and not outbox.messages(DeliveryState.WAITING):
            break
    delivering.cancel()
    await asyncio.gather(delivering, return_exceptions=True)
    connection.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
