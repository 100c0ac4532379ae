"""`kc-otel gate live`: the offline stage with two live endpoints in place of recordings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.gate_run import (
    AllowUnjudged,
    ChainFile,
    ContractFile,
    EvidenceFile,
    JunitFile,
    KernelFields,
    MarkdownFile,
    Options,
    Required,
    RequiredSlices,
    gate_offline,
)

if TYPE_CHECKING:
    from kc_otel.recordings import Recording

__all__ = ["live"]


def live(
    contract: ContractFile,
    inference_url: Annotated[
        str, typer.Option(help="OpenAI-compatible endpoint to sample from; its key is in KC_OTEL_INFERENCE_API_KEY.")
    ],
    train_url: Annotated[
        str,
        typer.Option(
            help="Endpoint that scores the same tokens, with vLLM's prompt_logprobs; its key is in "
            "KC_OTEL_TRAIN_API_KEY."
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl",
            help="A JSON object per line: prompt, prompt_token_ids or messages; its other values are what slices "
            "are made of.",
        ),
    ],
    inference_model: Annotated[str | None, typer.Option(help="Where the endpoint serves more than one.")] = None,
    train_model: Annotated[str | None, typer.Option(help="Where the endpoint serves more than one.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt; other prompts tell more.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a completion.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="1 and nothing else, with every token allowed: that is what endpoints score.")
    ] = 1.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 120.0,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the recording goes; else beside the evidence, else into a temporary folder that is kept.",
        ),
    ] = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop/--all", help="Stop as soon as the gate is decided, in either direction; or ask every prompt."
        ),
    ] = True,
    kernel: KernelFields = None,
    require: Required = None,
    slice: RequiredSlices = None,
    allow_unjudged: AllowUnjudged = False,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    evidence: EvidenceFile = None,
    chain: ChainFile = None,
) -> None:
    """Sample from one endpoint, score the same tokens with the other, and judge that recording.

    Prompts are asked in an order of their own, and no more of them than it takes to decide.

    Exits with 0 to advance, 1 when the version fails, 3 to wait (undecided), 2 when something cannot be used or a
    completion is missing.
    """
    from kc_otel.offline.gate.endpoint_recording import EndpointPair, IncompleteError, record_endpoints  # noqa: PLC0415
    from kc_otel.offline.gate.evidence_files import recording_beside  # noqa: PLC0415
    from kc_otel.recordings.endpoints import CompletionEndpoint  # noqa: PLC0415

    def recording(decided: Callable[[Recording], bool]) -> list[Path]:
        if temperature != 1.0:
            raise ValueError(
                f"--temperature: {temperature:g}: log-probabilities of given tokens are from before any temperature, "
                f"so both endpoints are compared at 1, with every token allowed; leave it out"
            )
        pair = EndpointPair(
            CompletionEndpoint("inference", inference_url, _key("INFERENCE")),
            CompletionEndpoint("train", train_url, _key("TRAIN")),
            inference_model,
            train_model,
            samples=samples,
            max_tokens=max_tokens,
            concurrency=concurrency,
            timeout=timeout,
        )
        beside = None if evidence is None else recording_beside(evidence)
        try:
            return [record_endpoints(pair, prompts, record or beside, _say, decided if stop else None)]
        except IncompleteError as error:
            if error.recording is None:
                raise
            hint = f"to have the rest judged all the same: kc-otel gate run {contract} {error.recording}"
            raise ValueError(f"{error}\n{hint}") from None

    gate_offline(
        Options(
            contract,
            kernel or (),
            require or (),
            slice or (),
            allow_unjudged,
            junit,
            markdown,
            evidence,
            sequential=stop,
            chain=chain,
        ),
        recording,
    )


def _key(side: str) -> str:
    return os.environ.get(f"KC_OTEL_{side}_API_KEY", "").strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
