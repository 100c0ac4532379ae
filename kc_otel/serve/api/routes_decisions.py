"""Routes for the decision table, and its resumption by a person."""

from __future__ import annotations

import time
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Response

from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.people_input import Name, SignedOrder, View, ordered
from kc_otel.serve.core import Core

_MAX_NAMED: Final = 5
_MAX_CHARACTERS: Final = 80
"""Contracts that an answer names as not served, and characters of each."""


class ResumeRequest(SignedOrder):
    """A person lifts a route."""

    contract: Name
    slice: Name | None = None
    """Only this slice; every slice when null."""


class Resumed(View):
    """Result of lifting routes."""

    lifted: int
    """Routes that were lifted."""
    version: int
    """Version of the decision table."""


def decision_routes(core: Core, decided: Changes) -> APIRouter:
    """`/api/v1/decisions` and `decisions/resume`."""
    router = APIRouter(prefix="/api/v1")

    @router.get(
        "/decisions",
        tags=["decisions"],
        response_model=None,
        responses={204: {"description": "The caller's table is in force."}},
    )
    async def decisions(
        after: Annotated[int, Query(description="Version of the caller's table; -1 for none.")] = -1,
        tag: Annotated[str, Query(description="ETag of the caller's table; empty to compare the version only.")] = "",
        wait: Annotated[float, Query(ge=0.0, le=60.0, description="Seconds to wait for a newer table.")] = 0.0,
        obeys: Annotated[
            list[str],
            Query(
                max_length=200,
                description="Directives that the caller follows, CONTRACT/DIRECTIVE each; CONTRACT/route/IDS adds how "
                "it defines the slices that its table names.",
            ),
        ] = [],  # noqa: B006 - FastAPI copies it
        kept: Annotated[
            list[str],
            Query(
                max_length=200,
                description="CONTRACT/SLICE/VERSION of requests that the caller keeps away from a version that it had "
                "sent requests to.",
            ),
        ] = [],  # noqa: B006 - FastAPI copies it
        instance: Annotated[
            str,
            Query(
                max_length=200,
                description="Id of the process; one that routes without an id counts as having applied no route.",
            ),
        ] = "",
        closing: Annotated[bool, Query(description="Whether the process is ending and no longer waited for.")] = False,
    ) -> Response:
        """Return the decision table; 204 if the caller's table is still in force after the wait.

        The header `Age` has the seconds since the last evaluation. `KC-Unserved` names contracts of `obeys` that this
        evaluator does not serve, or whose policy fails.
        """
        if closing:
            core.listeners.closed(instance)
            return Response(status_code=204)
        asked = {subject.partition("/")[0][:_MAX_CHARACTERS] for subject in obeys} - {""}
        unserved = {name for name in asked if name not in core.contracts or core.fails(name)}
        headers = {"KC-Unserved": " ".join(map(quote, sorted(unserved)[:_MAX_NAMED]))} if unserved else {}
        known = not tag or core.decisions.tag == tag
        current = known and core.decisions.version == after
        core.listeners.heard(
            obeys,
            core.contracts,
            time.time(),
            instance=instance,
            table_at=core.decisions.at if current else None,
            kept=kept,
            versions=core.inference_versions,
        )
        if known and not await decided.wait_for(lambda: core.decisions.version != after, wait):
            return Response(status_code=204, headers={"Age": f"{core.age:.0f}", **headers})
        table = core.decisions
        return Response(
            table.to_json(),
            media_type="application/json",
            headers={"ETag": f'"{table.tag}"', "Cache-Control": "no-cache", "Age": f"{core.age:.0f}", **headers},
        )

    @router.post("/decisions/resume", tags=["decisions"])
    async def resume(request: ResumeRequest) -> Resumed:
        """Lift routes: send a slice's traffic back to the kernel versions that they avoid."""
        async with ordered(core):
            lifted = core.resume(**request.model_dump(), now=time.time())
        await decided.notify()
        return Resumed(lifted=lifted, version=core.decisions.version)

    return router
