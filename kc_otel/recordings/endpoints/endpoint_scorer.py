"""A vLLM or SGLang server as the kernel that scores: `kc-otel rescore --train-url`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.comparable import effective
from kc_otel.recordings.endpoints.endpoint_client import CompletionClient, CompletionEndpoint

with extra("cli", "asking a server"):
    import httpx


def endpoint_scorer(url: str, key: str = "") -> Callable[..., list[tuple[float, ...]]]:
    """A server that serves one model, as a `Scorer`. It scores at temperature 1, with every token allowed.

    Args:
        url: Its address, with or without /v1.
        key: Sent as a bearer token; empty for none.

    Raises:
        ValueError: If the address or key cannot be used; from the scorer, if tokens were drawn with a temperature or a
            truncation.
        CompletionEndpointError: From the scorer, if the server does not answer, or not with log-probabilities.
    """
    endpoint = CompletionEndpoint("train", url, key)

    def score(
        prompt_ids: Sequence[Any], token_ids: Sequence[Any], processing: Mapping[str, Scalar] | None = None
    ) -> list[tuple[float, ...]]:
        if changed := effective(processing or {}):
            raise ValueError(f"a server scores tokens without {', '.join(sorted(changed))}; score them with --model")

        async def every() -> list[tuple[float, ...]]:
            async with httpx.AsyncClient() as http:
                client = CompletionClient(endpoint, http)
                model = await client.model(None)
                pairs = zip(prompt_ids, token_ids, strict=True)
                return await asyncio.gather(*(client.score(model, [*map(int, a)], [*map(int, b)]) for a, b in pairs))

        return asyncio.run(every())

    return score
