"""`kc-otel gate` and `verify`: may a kernel version leave its stage, and is that evidence what it claims to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kc_otel.cli import _gate_options as options
from kc_otel.cli._gate_options import refuse, refuse_mixed
from kc_otel.cli.api_client import DEFAULT_URL, Url, get
from kc_otel.judge.promotion.stages import Stage

__all__ = ["register"]

_EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gate")(gate)
    app.command("verify")(verify)


def gate(
    context: typer.Context,
    what: options.What = None,
    contract: options.Contract = None,
    kernel: options.Kernel = None,
    require: options.Require = None,
    slice: options.Slice = None,
    allow_unjudged: options.AllowUnjudged = False,
    columns: options.Columns = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    inference_url: options.InferenceUrl = None,
    train_url: options.TrainUrl = None,
    prompts: options.Prompts = None,
    inference_model: options.InferenceModel = None,
    train_model: options.TrainModel = None,
    samples: options.Samples = 1,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 1.0,
    concurrency: options.Concurrency = 8,
    timeout: options.Timeout = 120.0,
    record: options.Record = None,
    plan: options.Plan = False,
    tokens_per_second: options.TokensPerSecond = None,
    sampling: options.Sampling = None,
    tokens_per_sequence: options.TokensPerSequence = None,
    share: options.Share = None,
    stage: options.InStage = Stage.CANARY,
    since: options.Since = 0.0,
    url: Url = DEFAULT_URL,
    windows: options.Windows = None,
    evidence: options.Evidence = None,
) -> None:
    """Ask whether a kernel version may leave its stage; it prints what failed or what is missing.

    With --contract FILE, recordings of both kernels are judged here: the offline stage, in a CI job. With two live
    endpoints, the recording is made first: one samples, the other scores the same tokens. Without --contract, a running
    evaluator is asked about the traffic that it has seen.

    Exits with 0 to advance, 1 when the version fails, 3 to wait (undecided), 2 when something cannot be used.
    """
    given = {name for name in context.params if _was_given(context, name)}
    refuse_mixed(given, recorded=contract is not None, plan=plan)
    if contract is None:
        if len(what or []) != 2:
            refuse("name a contract and a kernel to ask an evaluator, or give --contract FILE and recordings")
        name, version = what or []
        _ask(name, version, stage=stage, windows=windows or 3, since=since, evidence=evidence, url=url)
        return
    # Everything below needs NumPy or more; --help does not.
    if plan:
        from kc_otel.cli._gate_plan import print_plan  # noqa: PLC0415

        if what:
            refuse(f"--plan: reads no recording; leave {what[0]} out, or leave --plan out")
        code = print_plan(
            contract,
            windows=windows or 3,
            tokens_per_second=tokens_per_second,
            sampling=sampling,
            tokens_per_sequence=tokens_per_sequence,
            shares=share or [],
        )
        raise typer.Exit(code)
    from kc_otel.cli._gate_recorded import Asked, gate_files  # noqa: PLC0415

    asked = Asked(
        contract=contract,
        recordings=tuple(what or []),
        kernel=tuple(kernel or []),
        require=tuple(require or []),
        slices=tuple(slice or []),
        allow_unjudged=allow_unjudged,
        columns=columns,
        windows=windows or 1,
        junit=junit,
        markdown=markdown,
        evidence=evidence,
    )
    if inference_url is not None and train_url is not None and prompts is not None:
        from kc_otel.cli._gate_live import Live, gate_live  # noqa: PLC0415

        live = Live(
            inference_url,
            train_url,
            prompts,
            inference_model,
            train_model,
            samples=samples,
            max_tokens=max_tokens,
            temperature=temperature,
            concurrency=concurrency,
            timeout=timeout,
            record=record,
        )
        raise typer.Exit(_EXIT[gate_live(live, asked)])
    if not what:
        refuse(
            "no recording is given; name at least one .npz, .jsonl, .jsonl.gz or .parquet, give --inference-url, "
            "--train-url and --prompts to make one, or ask for --plan"
        )
    raise typer.Exit(_EXIT[gate_files(asked)])


def verify(
    record: Annotated[Path, typer.Argument(help="What `kc-otel gate --evidence` wrote: the file, or its folder.")],
    recordings: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE_OR_DIR", help="Judge its recordings again; they are found by checksum; repeatable."),
    ] = None,
) -> None:
    """Check evidence: its checksum, and that its verdicts and decision follow from its own numbers.

    With --recordings, every number is computed again from the files. Exits with 1 when something does not hold.
    """
    from kc_otel.offline.gate.evidence import EvidenceError, verify_evidence, verify_recordings  # noqa: PLC0415

    path = record / "evidence.json" if record.is_dir() else record
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if recordings:
            verify_recordings(content, [file for each in recordings for file in _files(each)])
        else:
            verify_evidence(content)
    except OSError as error:
        print(f"{error.filename or path}: cannot be read ({error.strerror})", file=sys.stderr)
        raise typer.Exit(2) from None
    except (EvidenceError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    typer.echo(f"{path}: sound" + (", and its recordings give the same verdicts" if recordings else ""))


def _ask(
    contract: str, kernel: str, *, stage: Stage, windows: int, since: float, evidence: Path | None, url: str
) -> None:
    parameters = {"kernel": kernel, "stage": stage.value, "windows": windows, "since": str(since)}
    answer = get(url, f"/api/v1/gates/{contract}", **parameters)
    decision = answer["decision"]
    typer.echo(f"{decision['outcome']}: {kernel} in stage {stage}, {decision['windows']} of {windows} windows passed")
    for reason in decision["missing"]:
        typer.echo(f"  {reason}")
    if evidence is not None:
        if answer["evidence"] is None:
            print(f"nothing was written to {evidence}: no verdict speaks of {kernel} yet", file=sys.stderr)
        else:
            evidence.write_text(json.dumps(answer["evidence"], indent=2, sort_keys=True) + "\n", encoding="utf-8")
            typer.echo(f"evidence: {evidence}")
    raise typer.Exit(_EXIT[decision["outcome"]])


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
