"""Two live endpoints: one samples, the other scores exactly the same tokens, and both are a recording afterwards."""

from kc_otel.recordings.endpoints.collect import Collected, Failure, collect
from kc_otel.recordings.endpoints.endpoint_client import (
    CompletionClient,
    CompletionEndpoint,
    CompletionEndpointError,
    RefusedError,
    RequestFailedError,
)
from kc_otel.recordings.endpoints.prompts import Prompt, PromptsError, read_prompts

__all__ = [
    "Collected",
    "CompletionClient",
    "CompletionEndpoint",
    "CompletionEndpointError",
    "Failure",
    "Prompt",
    "PromptsError",
    "RefusedError",
    "RequestFailedError",
    "collect",
    "read_prompts",
]
