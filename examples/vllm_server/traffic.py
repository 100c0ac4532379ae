"""Clients of the server: completions of code and of prose, which say which of them they are."""

from __future__ import annotations

import asyncio

import httpx

from examples.tiny_model import prompts
from examples.vllm_server.server import NAME

SLICES = ("code", "prose")


async def send(address: str, requests: int, *, tokens: int = 48) -> int:
    """Send so many requests of each slice, some at a time; returns how many tokens came back."""
    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120.0) as client:
        answers = await asyncio.gather(
            *(_complete(client, slice_, prompt, tokens) for slice_ in SLICES for prompt in prompts(slice_, requests))
        )
    return sum(answers)


async def _complete(client: httpx.AsyncClient, slice_: str, prompt: str, tokens: int) -> int:
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens}
    if slice_ == "code":
        # In the body, as `extra_body` of OpenAI's own client; vLLM hands it on to whoever knows it.
        answer = await client.post("/v1/completions", json={**body, "vllm_xargs": {"task": slice_}})
    else:
        # Or in a header, where a gateway can put it without touching the body.
        answer = await client.post("/v1/completions", json=body, headers={"baggage": f"task={slice_}"})
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])
