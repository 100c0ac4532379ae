"""Clients of the server: completions of several kinds of text, which say which of them they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from examples.tiny_model import prompts
from examples.vllm_server.server import NAME

SLICES = ("code", "prose")


async def send(
    address: str,
    requests: int,
    *,
    slices: Sequence[str] = SLICES,
    characters: int = 120,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Send so many requests of each slice, some at a time; returns how many tokens came back.

    Args:
        address: Base URL of the server.
        requests: How many of each slice.
        slices: Kinds of text.
        characters: Length of the prompts.
        options: Further parameters of each, such as temperature.
    """
    body = {"model": NAME, "max_tokens": 48, **(options or {})}
    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120.0) as client:
        texts = [(slice, prompt) for slice in slices for prompt in prompts(slice, requests, characters=characters)]
        answers = await asyncio.gather(*(_complete(client, slice, {**body, "prompt": text}) for slice, text in texts))
    return sum(answers)


async def _complete(client: httpx.AsyncClient, slice: str, body: Mapping[str, Any]) -> int:
    if slice == "code":
        # In the body, as `extra_body` of OpenAI's own client; vLLM hands it on to whoever knows it.
        answer = await client.post("/v1/completions", json={**body, "vllm_xargs": {"task": slice}})
    else:
        # Or in a header, where a gateway can put it without touching the body.
        answer = await client.post("/v1/completions", json=body, headers={"baggage": f"task={slice}"})
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])
