"""Requests to a vLLM, SGLang or OpenAI-compatible server: its key, its patience, and what its refusals mean.

CompletionEndpointError
|-- RefusedError          every request would end like this: nobody there, no such model, no log-probabilities
'-- RequestFailedError    this one did: too long a prompt, a timeout, still busy after several attempts
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from kc_otel._extras import extra
from kc_otel.contract.model import (
    NUMBER_FORMATS,
    OTHERWISE_REMEDY,
    KernelSpec,
    cache_may_be_the_checkpoints,
    declared_otherwise,
)
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.endpoints import protocol
from kc_otel.recordings.request import effective
from kc_otel.recordings.scoring import UnavailableError, UnscorableError

with extra("cli", "asking an endpoint"):
    import httpx

_BUSY_STATUSES: Final = frozenset({429, 502, 503, 504})
_NOT_TAKEN_STATUSES: Final = frozenset({400, 413, 422})
_MAX_ATTEMPTS: Final = 5
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0
_CONNECT_SECONDS: Final = 10.0
_MAX_QUOTED_CHARACTERS: Final = 300

_Read = TypeVar("_Read")


class CompletionEndpointError(Exception):
    """An endpoint did not answer, or not with what a comparison takes; the message names it."""


class RefusedError(CompletionEndpointError):
    """Every request would end like this."""


class RequestFailedError(CompletionEndpointError):
    """One request did not succeed."""


class NotTakenError(RequestFailedError):
    """The server answered that it does not take this request: it would not if it were asked again."""


@dataclass(frozen=True, slots=True)
class CompletionEndpoint:
    """Address of the server that samples (`inference`) or scores (`train`); no message has its key."""

    side: Literal["inference", "train"]
    url: str
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"--{self.side}-url: is not a URL ({error})") from None
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise ValueError(f"--{self.side}-url: {self.url!r} is not a URL such as http://127.0.0.1:8000")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError(
                f"{self.key_variable}: holds characters that no HTTP header can; is it cut or pasted wrong?"
            )

    @property
    def root(self) -> str:
        """The URL that /v1 and /tokenize are under."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def place(self) -> str:
        """The root with one name for this machine."""
        return re.sub(r"//(localhost|0\.0\.0\.0|\[::1\])(?=[:/]|$)", "//127.0.0.1", self.root)

    @property
    def key_variable(self) -> str:
        """Environment variable that its key is read from."""
        return f"KC_OTEL_{self.side.upper()}_API_KEY"

    def __str__(self) -> str:
        where = str(httpx.URL(self.root).copy_with(userinfo=b"", query=None, fragment=None))
        return f"{self.side} endpoint {where}"


class CompletionClient:
    """One endpoint, SGLang by its own `/generate`; `timeout` is of one of the `attempts`."""

    def __init__(
        self,
        endpoint: CompletionEndpoint,
        http: httpx.AsyncClient,
        *,
        timeout: float = 120.0,
        attempts: int = _MAX_ATTEMPTS,
    ) -> None:
        self.endpoint = endpoint
        self._http = http
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._attempts = attempts
        self._generates = False
        self.context: int | None = None
        self._headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}

    async def model(self, wanted: str | None) -> str:
        """The model to ask for: the one that is wanted, if it is served, or the only one."""
        option = f"--{self.endpoint.side}-model"
        try:
            response = await self._get("/v1/models")
        except httpx.HTTPError as error:
            raise RefusedError(
                f"{self.endpoint}: does not answer ({self._described(error)}); is it up, and is that its address?"
            ) from None
        if response.status_code in {401, 403}:
            raise self._no_entry(response)
        names, self.context, self._generates = protocol.served(_json(response) if response.is_success else None)
        if wanted is not None:
            if names and wanted not in names:
                raise RefusedError(f"{self.endpoint}: {option}: serves no {wanted!r}; it serves {', '.join(names)}")
            return wanted
        if len(names) != 1:
            unknown = f"does not say what it serves ({response.status_code}: {self._described(response)})"
            said = f"serves {', '.join(names)}" if names else unknown
            raise RefusedError(f"{self.endpoint}: {said}; name the model with {option}")
        return names[0]

    async def version(self) -> str | None:
        """The engine's version, where it says one: vLLM does under /version."""
        try:
            response = await self._get("/version")
        except httpx.HTTPError:
            return None
        said = _json(response) if response.is_success else None
        version = said.get("version") if isinstance(said, dict) else None
        return version if isinstance(version, str) and version.isprintable() else None

    async def unsaid(self, declared: KernelSpec) -> list[str]:
        """Number formats of a declared kernel that the engine does not say; a RefusedError if it says others.

        vLLM says that of its cache alone.
        """
        formats = {name: text for name in NUMBER_FORMATS if (text := getattr(declared, name)) is not None}
        if not formats:
            return []
        try:
            response = await self._get(protocol.SERVER_INFO if self._generates else protocol.METRICS)
        except httpx.HTTPError:
            return [*formats]
        served = {}
        if response.is_success:
            text = response.text
            served = protocol.number_formats(_json(response)) if self._generates else protocol.cache_format(text)
        if served.get("kv_cache_dtype") == "auto" and cache_may_be_the_checkpoints(declared):
            del served["kv_cache_dtype"]  # vLLM's front end does not hear of it
        if said := declared_otherwise(declared, formats | served):
            raise RefusedError(f"{self.endpoint}: {'; '.join(said)}; {OTHERWISE_REMEDY}")
        return [name for name in formats if name not in served]

    async def tokenized(self, model: str, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Tokens of a conversation, by the endpoint's chat template."""
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        return await self._read("/tokenize", body, protocol.tokenized)

    async def sample(self, model: str, sent: str | Sequence[int], max_tokens: int) -> protocol.Sampled:
        """One completion of a prompt, text or tokens."""
        if self._generates:
            body = protocol.generation_body(sent, max_tokens)
            return await self._read(protocol.GENERATE, body, lambda answer: protocol.generated(answer, sent))
        body = protocol.sampling_body(model, sent, max_tokens)
        return await self._read(protocol.COMPLETIONS, body, lambda answer: protocol.sampled(answer, sent))

    async def score(self, model: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of given tokens after a prompt, nats."""
        tokens = (*prompt_ids, *token_ids)
        if self._generates:
            path, body, scored = protocol.GENERATE, protocol.scores_body(tokens), protocol.scores
        else:
            path, body, scored = protocol.COMPLETIONS, protocol.scoring_body(model, tokens), protocol.scored
        return await self._read(path, body, lambda answer: scored(answer, prompt_ids, token_ids))

    async def _read(self, path: str, body: Mapping[str, Any], read: Callable[[Any], _Read]) -> _Read:
        """Return what `read` finds in the answer to a request; one that lacks it would lack it in every answer."""
        try:
            return read(await self._post(path, body))
        except protocol.AnswerError as error:
            raise RefusedError(f"{self.endpoint}: {error}") from None

    async def _get(self, path: str) -> httpx.Response:
        return await self._http.get(self.endpoint.root + path, headers=self._headers, timeout=self._timeout)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        for attempt in range(1, self._attempts + 1):
            wait = min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)  # noqa: S311
            try:
                response = await self._http.post(
                    self.endpoint.root + path, json=body, headers=self._headers, timeout=self._timeout
                )
            except httpx.TimeoutException as error:
                # Asked again, it would work on both.
                raise RequestFailedError(f"{self.endpoint}: no answer in time ({self._described(error)})") from None
            except httpx.HTTPError as error:
                failed = f"does not answer ({self._described(error)})"
            else:
                if response.status_code not in _BUSY_STATUSES:
                    return self._content(response, path)
                failed = f"{response.status_code}: {self._described(response)}"
                wait = _asked_to_wait(response, wait)
            if attempt < self._attempts:
                await asyncio.sleep(wait)
        raise RequestFailedError(f"{self.endpoint}: {failed}; {self._attempts} attempts")

    def _content(self, response: httpx.Response, path: str) -> Any:
        code = response.status_code
        if code in {401, 403}:
            raise self._no_entry(response)
        if code in {404, 405} or response.is_redirect:
            raise RefusedError(f"{self.endpoint}: {path}: {code}: {self._described(response)}")
        if not response.is_success:
            kind = NotTakenError if code in _NOT_TAKEN_STATUSES else RequestFailedError
            raise kind(f"{self.endpoint}: {code}: {self._described(response)}")
        if (content := _json(response)) is None:
            raise RefusedError(f"{self.endpoint}: {path}: answers with something else than JSON")
        return content

    def _no_entry(self, response: httpx.Response) -> RefusedError:
        known = f"the key in {self.endpoint.key_variable} is refused"
        missing = f"it wants a key; put it into {self.endpoint.key_variable}"
        return RefusedError(f"{self.endpoint}: {response.status_code}: {known if self.endpoint.key else missing}")

    def _described(self, what: httpx.Response | Exception) -> str:
        """Its own words, on one line, without the key should it repeat it."""
        if isinstance(what, Exception):
            text = f"{type(what).__name__}: {what}" if str(what) else type(what).__name__
        else:
            body = _json(what)
            error = body.get("error", body) if isinstance(body, dict) else None
            message = error.get("message") if isinstance(error, dict) else error
            text = str(message or what.headers.get("location") or what.text or what.reason_phrase)
        text = " ".join(text.split())
        if self.endpoint.key:
            text = text.replace(self.endpoint.key, "***")
        return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}..."


def endpoint_scorer(
    url: str, key: str = "", name: str | None = None, declared: KernelSpec | None = None
) -> Callable[..., list[tuple[float, ...]]]:
    """A server as a `Scorer`, at temperature 1, or UnscorableError, NotTakenError, UnavailableError.

    It serves one model, or that of the `name`, and is the `declared` kernel as far as it says.
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
                model = await client.model(name)
                if declared is not None:
                    await client.unsaid(declared)
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


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _asked_to_wait(response: httpx.Response, otherwise: float) -> float:
    """Seconds of Retry-After; its other form, a date, is rare and no better than our own wait."""
    text = response.headers.get("retry-after", "")
    return min(float(text), _LONGEST_WAIT_SECONDS) if text.isdecimal() else otherwise
