"""The options of `kc-otel gate`, by what is asked, and which of them do not go together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from kc_otel.judge.promotion.stages import Stage

__all__ = [
    "AllowUnjudged",
    "Columns",
    "Concurrency",
    "Contract",
    "Evidence",
    "InStage",
    "InferenceModel",
    "InferenceUrl",
    "Junit",
    "Kernel",
    "Markdown",
    "MaxTokens",
    "Plan",
    "Prompts",
    "Record",
    "Require",
    "Samples",
    "Sampling",
    "Share",
    "Since",
    "Slice",
    "Temperature",
    "Timeout",
    "TokensPerSecond",
    "TokensPerSequence",
    "TrainModel",
    "TrainUrl",
    "What",
    "Windows",
    "refuse",
    "refuse_mixed",
]

_RECORDED: Final = "Recordings (with --contract)"
_ENDPOINTS: Final = "Two live endpoints in place of recordings (with --contract)"
_PLANNED: Final = "Before anything is recorded (with --contract)"
_LIVE: Final = "A running evaluator (without --contract)"

_ONLY_LIVE: Final = ("stage", "since", "url")
_ONLY_RECORDED: Final = ("columns", "kernel", "require", "slice", "allow_unjudged", "junit", "markdown")
_ONLY_PLANNED: Final = ("tokens_per_second", "sampling", "tokens_per_sequence", "share")
_NEEDED_OF_ENDPOINTS: Final = ("inference_url", "train_url", "prompts")
_ONLY_ENDPOINTS: Final = (
    *_NEEDED_OF_ENDPOINTS, "inference_model", "train_model", "samples", "max_tokens", "temperature", "concurrency",
    "timeout", "record",
)  # fmt: skip
_BESIDE_ENDPOINTS: Final = (
    (("columns",), "is about recordings that are there; two endpoints make their own"),
    (("windows",), "two endpoints make one recording; record several with --record, and give them together"),
    (("what",), "a recording, or two endpoints; leave out either"),
)

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECORDING... | NAME KERNEL]",
        help="With --contract: .npz, .jsonl, .jsonl.gz or .parquet, each its own window. Without: a contract's "
        "name and the short fingerprint of an inference kernel, to ask a running evaluator.",
        show_default=False,
    ),
]
Contract = Annotated[
    str | None, typer.Option(metavar="FILE", help="Contract that judges recordings.", rich_help_panel=_RECORDED)
]
Kernel = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIDE.FIELD=VALUE",
        help="What a kernel was, such as inference.version=0.32.0; repeatable. The contract says the rest.",
        rich_help_panel=_RECORDED,
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(metavar="CLAUSE", help="Only this clause has to PASS; repeatable.", rich_help_panel=_RECORDED),
]
Slice = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only on this slice, or `all`; repeatable.", rich_help_panel=_RECORDED),
]
AllowUnjudged = Annotated[
    bool,
    typer.Option("--allow-unjudged", help="Leave out clauses that no recording can tell.", rich_help_panel=_RECORDED),
]
Columns = Annotated[str | None, typer.Option(help="Names of columns: train=A,inference=B.", rich_help_panel=_RECORDED)]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.", rich_help_panel=_RECORDED)]
Markdown = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write Markdown; it also goes to $GITHUB_STEP_SUMMARY.", rich_help_panel=_RECORDED
    ),
]
InferenceUrl = Annotated[
    str | None,
    typer.Option(
        help="OpenAI-compatible endpoint to sample from; its key is in KC_OTEL_INFERENCE_API_KEY.",
        rich_help_panel=_ENDPOINTS,
    ),
]
TrainUrl = Annotated[
    str | None,
    typer.Option(
        help="Endpoint that scores the same tokens, with vLLM's prompt_logprobs; its key is in KC_OTEL_TRAIN_API_KEY.",
        rich_help_panel=_ENDPOINTS,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="A JSON object per line: prompt, prompt_token_ids or messages; its other values are what slices "
        "are made of.",
        rich_help_panel=_ENDPOINTS,
    ),
]
InferenceModel = Annotated[
    str | None, typer.Option(help="Where the endpoint serves more than one.", rich_help_panel=_ENDPOINTS)
]
TrainModel = Annotated[
    str | None, typer.Option(help="Where the endpoint serves more than one.", rich_help_panel=_ENDPOINTS)
]
Samples = Annotated[
    int, typer.Option(min=1, help="Completions of each prompt; other prompts tell more.", rich_help_panel=_ENDPOINTS)
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a completion.", rich_help_panel=_ENDPOINTS)]
Temperature = Annotated[
    float,
    typer.Option(
        help="1 and nothing else, with every token allowed: that is what endpoints score.", rich_help_panel=_ENDPOINTS
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at a time.", rich_help_panel=_ENDPOINTS)]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.", rich_help_panel=_ENDPOINTS)]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Where the recording goes; else beside the evidence, else into a temporary folder that is kept.",
        rich_help_panel=_ENDPOINTS,
    ),
]
Plan = Annotated[
    bool,
    typer.Option("--plan", help="Only say how many observations each clause needs at best.", rich_help_panel=_PLANNED),
]
TokensPerSecond = Annotated[
    float | None, typer.Option(min=1e-9, help="Tokens that are generated.", rich_help_panel=_PLANNED)
]
Sampling = Annotated[
    float | None,
    typer.Option(min=1e-9, max=1.0, help="Share that is measured; else the contract's.", rich_help_panel=_PLANNED),
]
TokensPerSequence = Annotated[
    float | None, typer.Option(min=1.0, help="Else assumptions.horizon, at worst.", rich_help_panel=_PLANNED)
]
Share = Annotated[
    list[str] | None,
    typer.Option(metavar="SLICE=SHARE", help="Part of the traffic; repeatable.", rich_help_panel=_PLANNED),
]
InStage = Annotated[Stage, typer.Option(help="Stage that the version is in.", rich_help_panel=_LIVE)]
Since = Annotated[float, typer.Option(help="Unix time at which the version entered the stage.", rich_help_panel=_LIVE)]
Windows = Annotated[
    int | None,
    typer.Option(
        min=1, help="Consecutive windows that must PASS; 3, of recordings 1. All given must.", show_default=False
    ),
]
Evidence = Annotated[
    Path | None, typer.Option(metavar="FILE_OR_DIR", help="Write the evidence here, for `kc-otel verify`.")
]


def refuse_mixed(given: set[str], *, recorded: bool, plan: bool) -> None:
    """End the program with 2 where an option of another way to ask would be read as if it had counted."""
    if plan and not recorded:
        refuse("--plan: needs --contract FILE")
    wrong: list[tuple[tuple[str, ...], str]] = []
    if recorded:
        wrong.append((_ONLY_LIVE, "asks a running evaluator; leave it out, or leave --contract out"))
    else:
        wrong.append((_ONLY_RECORDED, "is about recordings; give --contract FILE and recordings"))
        wrong.append((_ONLY_ENDPOINTS, "records from two endpoints; give --contract FILE"))
    if plan:
        wrong.append(((*_ONLY_RECORDED, "evidence"), "is about recordings; leave it out, or leave --plan out"))
        wrong.append((_ONLY_ENDPOINTS, "records from two endpoints; leave it out, or leave --plan out"))
    else:
        wrong.append((_ONLY_PLANNED, "is for planning; add --plan"))
    if given & set(_ONLY_ENDPOINTS):
        wrong += _BESIDE_ENDPOINTS
    for names, why in wrong:
        for name in names:
            if name in given:
                refuse(f"{_option(name)}: {why}")
    for name in _NEEDED_OF_ENDPOINTS if given & set(_ONLY_ENDPOINTS) else ():
        if name not in given:
            refuse(f"{_option(name)}: is missing; two endpoints take {', '.join(map(_option, _NEEDED_OF_ENDPOINTS))}")


def refuse(why: str) -> NoReturn:
    """End the program with 2."""
    print(why, file=sys.stderr)
    raise typer.Exit(2)


def _option(name: str) -> str:
    return "RECORDING" if name == "what" else f"--{name.replace('_', '-')}"
