"""SGLang as the kernel that scores: `kc-otel rescore --scorer kc_otel.recordings.endpoints.generate_scorer:score`.

The server's address is in KC_OTEL_TRAIN_URL and its key, where it wants one, in KC_OTEL_TRAIN_API_KEY.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.comparable import effective
from kc_otel.recordings.endpoints.endpoint_client import CompletionClient, CompletionEndpoint

with extra("cli", "asking a server"):
    import httpx


def score(
    prompt_ids: Sequence[Any], token_ids: Sequence[Any], processing: Mapping[str, Scalar] | None = None
) -> list[tuple[float, ...]]:
    """Log-probabilities of given tokens, as a `Scorer`.

    Raises:
        ValueError: If no server is named, or the requests were drawn with a temperature or a truncation: the server's
        values for given tokens are from before these.
        CompletionEndpointError: If the server does not answer.
    """
    if changed := effective(processing or {}):
        raise ValueError(f"/generate scores tokens without {', '.join(sorted(changed))}; score them with --model")
    url = os.environ.get("KC_OTEL_TRAIN_URL", "")
    endpoint = CompletionEndpoint("train", url, os.environ.get("KC_OTEL_TRAIN_API_KEY", "").strip())

    async def every() -> list[tuple[float, ...]]:
        async with httpx.AsyncClient() as http:
            client = CompletionClient(endpoint, http)
            model = await client.model(None)
            pairs = zip(prompt_ids, token_ids, strict=True)
            return await asyncio.gather(*(client.score(model, [*map(int, a)], [*map(int, b)]) for a, b in pairs))

    return asyncio.run(every())
