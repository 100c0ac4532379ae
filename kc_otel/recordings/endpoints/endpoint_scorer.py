"""A vLLM or SGLang server as the kernel that scores: `kc-otel rescore --train-url`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.comparable import effective
from kc_otel.recordings.endpoints.endpoint_client import (
    CompletionClient,
    CompletionEndpoint,
    CompletionEndpointError,
    NotTakenError,
)
from kc_otel.recordings.scoring import UnavailableError, UnscorableError

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
        UnscorableError: From the scorer, if a request fills the server's context.
        NotTakenError: From the scorer, if the server rejects a request.
        UnavailableError: From the scorer, if the server does not answer, or not with log-probabilities.
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
                pairs = [([*map(int, a)], [*map(int, b)]) for a, b in zip(prompt_ids, token_ids, strict=True)]
                longest = max(len(a) + len(b) for a, b in pairs)
                if client.context is not None and longest >= client.context:  # one more is generated
                    raise UnscorableError(
                        f"{endpoint}: a request of {longest:,} tokens fills the context of {client.context:,}; serve "
                        "the scoring kernel with a longer one (--max-model-len)"
                    )
                return await asyncio.gather(*(client.score(model, a, b) for a, b in pairs))

        try:
            return asyncio.run(every())
        except NotTakenError:
            raise
        except CompletionEndpointError as error:
            raise UnavailableError(str(error)) from error

    return score
