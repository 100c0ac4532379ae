"""The evaluator's API of a core, without a port."""

from collections import Counter
from collections.abc import Collection

from fastapi import FastAPI
from starlette.testclient import TestClient

from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read

__all__ = ["api_of", "client_of", "route_kept"]


def api_of(core: Core, counts: Counter[tuple[str, str]] | None = None, changes: Changes | None = None) -> FastAPI:
    counts = Counter() if counts is None else counts
    return make_api(core, lambda: read(core, counts, Counter()), changes or Changes(), "0")


def client_of(core: Core, **options: bool) -> TestClient:
    return TestClient(api_of(core), **options)


def route_kept(core: Core, now: float, *slices: str, versions: Collection[str] = ()) -> None:
    """A router says that it keeps all requests, or those of slices, from the kernel that it sent them to."""
    versions = versions or core.inference_versions("policy")
    assert versions
    kept = [f"policy/{slice}/{version}" for slice in slices or ("all",) for version in versions]
    defined = "".join(core.contracts["policy"].slice_ids.values())
    core.listeners.heard(
        [f"policy/route/{defined}" if defined else "policy/route"], core.contracts, now,
        instance="router", table_at=core.decisions.at, kept=kept, versions=lambda _: versions,
    )  # fmt: skip
