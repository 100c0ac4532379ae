"""From the export that breaks a limit to its webhook: `python tests/benchmarks/bench_webhook.py [BREACHES]`.

A real `kc-otel serve` with its default tick of a second and, as messages about different contracts wait for nothing,
`--group-wait 0s`; sixty contracts, of which one after the other breaks at a random moment, over HTTP, on a log that is
synced before it acknowledges. Clocked is from before the export is sent until the webhook's body has been received and
its signature verified.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from tests.benchmarks.bench_overload import CONTRACT, message
from tests.integration.conftest import SECRET, Evaluator, Pager

__all__ = ["breaches"]


def breaches(count: int, folder: Path) -> list[float]:
    """Seconds from each of so many breaches to its webhook."""
    names = [f"policy-{number}" for number in range(count)]
    contracts = folder / "contracts"
    contracts.mkdir()
    for name in names:
        (contracts / f"{name}.yaml").write_text(CONTRACT.replace("name: policy", f"name: {name}"))
    pager = Pager()
    environ = {
        "KC_OTEL_WEBHOOK_PAGER_URL": pager.url,
        "KC_OTEL_WEBHOOK_PAGER_SECRET": SECRET,
        "KC_OTEL_WEBHOOK_PAGER_ALLOW_PRIVATE": "1",
    }
    found: list[float] = []
    try:
        evaluator = Evaluator(contracts, folder / "state.sqlite", environ, "--tick", "1")
        try:
            with httpx.Client(timeout=30) as client:
                for name in names:
                    time.sleep(random.uniform(0.0, 1.0))
                    body = message(["v1"], time.time_ns() - 10**9, 1000, contract=name)
                    before, began = len(pager.bodies), time.monotonic()
                    answer = client.post(
                        f"{evaluator.http}/v1/metrics", content=body, headers={"content-type": "application/x-protobuf"}
                    )
                    assert answer.status_code == 200
                    while len(pager.bodies) == before:
                        assert time.monotonic() - began < 30, evaluator.log
                        time.sleep(0.002)
                    found.append(time.monotonic() - began)
        finally:
            evaluator.stop()
    finally:
        pager.close()
    return found


def main() -> None:
    """Print the quantiles."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory() as folder:
        found = breaches(count, Path(folder))
    median, p99 = np.quantile(found, [0.5, 0.99])
    print(f"{count} breaches: median {median:.2f} s, p99 {p99:.2f} s, slowest {max(found):.2f} s to the webhook")


if __name__ == "__main__":
    main()
