"""`kc-otel locate`: which operator of a kernel it is, and what part of the drift is its."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url
from kc_otel.cli.incident_findings import By, IncidentId, attach, failing_cell
from kc_otel.cli.terminal import PrintJson, log_to_terminal, pairs, refuse, seconds, stopped_by_signals, unusable
from kc_otel.contract.load import load
from kc_otel.contract.slices import ALL

if TYPE_CHECKING:
    from kc_otel.contract.clause import Clause
    from kc_otel.contract.model import Contract, KernelSpec
    from kc_otel.diagnose.located import Located
    from kc_otel.diagnose.token_sequences import TokenSequence

__all__ = ["register"]

_DECODED: Final = 16
"""Tokens that an engine decodes after a prompt without a completion."""

Engine = Annotated[
    list[str] | None, typer.Option("--engine", metavar="NAME=VALUE", help="Argument of vllm.LLM; again for more.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("locate")(locate_command)
    app.command("capture")(capture_command)


def locate_command(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract that fails.")],
    train: Annotated[str, typer.Option(metavar="KERNEL", help="FILE.py:NAME, a checkpoint's folder, or a capture.")],
    infer: Annotated[str, typer.Option(metavar="KERNEL", help="Likewise, or vllm:FOLDER.")],
    sequences: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A recording, a spool, JSON lines with prompt_ids and token_ids, or FILE.py:NAME that returns those.",
        ),
    ],
    slice: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only sequences of this slice; that of --incident, or all.")
    ] = None,
    clause: Annotated[
        str | None, typer.Option(metavar="ID", help="The clause that fails; its metric is divided.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="SEQUENCES", help="The first so many.")] = 16,
    precision: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Number format whose rounding is no fault, such as bfloat16.")
    ] = None,
    shares: Annotated[bool, typer.Option(help="Divide the drift among what is above noise.")] = True,
    engine: Engine = None,
    as_json: PrintJson = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answer with its picture.")] = None,
    incident: IncidentId = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait, and look at incidents whose policy asks for it: `do: [locate]`.")
    ] = False,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="Of an incident, with --follow.")] = "10m",
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Name the operator whose numbers differ by more than noise, with its layer, module, tensor and share of the drift.

    Runs the kernels' programs. Exits with 0 where nothing is above noise, with 1 where something is, with 2 where the
    two cannot be compared.
    """
    if follow:
        if any(each is not None for each in (slice, clause, incident, html)):
            refuse("--follow: incidents say which slice and clause; leave out --slice, --clause, --incident and --html")
        options = {"--train": train, "--infer": infer, "--sequences": sequences, "--limit": limit, "--url": url}
        options |= {"--precision": precision} if precision else {}
        passed = ["--shares" if shares else "--no-shares", *(f"--engine={each}" for each in engine or ())]
        passed += [f"{name}={value}" for name, value in options.items()]
        _follow(contract, [*passed, *([f"--by={by}"] if by else [])], url, by, seconds("--budget", budget))
        return
    from kc_otel.diagnose.located import located_json  # noqa: PLC0415 - a quick --help
    from kc_otel.diagnose.located_text import located_sentence  # noqa: PLC0415

    with unusable(ModuleNotFoundError, TypeError):
        promise = load(contract)
        cell = None if incident is None else failing_cell(url, promise, incident)
        if cell is not None:
            slice, clause = slice or cell.slice, clause or cell.clause
        slice = slice or ALL
        failing = _clause(promise, clause)
        from kc_otel.diagnose.token_sequences import read_sequences  # noqa: PLC0415 - a quick --help

        given = read_sequences(sequences, contract=promise, slice=slice, most=limit)
        arguments = pairs("--engine", engine or ())
        if _is_capture(train) or _is_capture(infer):
            located = _of_captures(promise, train, infer, given, slice, precision, arguments)
        else:
            located = _of_kernels(promise, train, infer, given, slice, failing, precision, arguments, shares=shares)
    _show(located, as_json=as_json, html=html)
    if cell is not None:
        asked = {"contract": promise.hash, "train": train, "inference": infer, "sequences": sequences}
        evidence = {**located_json(located), "asked": asked, "version": version("kc-otel")}
        text = located_sentence(located)
        typer.echo(attach(url, cell.incident, "locate", slice, text, evidence, by), err=True)
    if located.findings:
        raise typer.Exit(1)


def capture_command(
    kernel: Annotated[
        str, typer.Argument(metavar="KERNEL", help="FILE.py:NAME, a checkpoint's folder, or vllm:FOLDER.")
    ],
    sequences: Annotated[str, typer.Option(metavar="FILE", help="As for locate; another capture for its tokens.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The capture; an interrupted one is gone on with.")],
    limit: Annotated[int, typer.Option(min=1, metavar="SEQUENCES", help="The first so many.")] = 16,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Number format to load a checkpoint in.")] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="The other kernel's, whose rounding is to be no fault.")
    ] = None,
    decode: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="An engine decodes so many where there is no completion.")
    ] = _DECODED,
    engine: Engine = None,
) -> None:
    """Write what a kernel's operators give, to be compared with another machine's by locate.

    Capture the inference kernel first, and the training kernel on its tokens (--sequences FIRST.capture).
    """
    with unusable(ModuleNotFoundError, TypeError):
        from kc_otel.contract.model import KernelSpec  # noqa: PLC0415 - a quick --help
        from kc_otel.diagnose.capture_file import CaptureWriter  # noqa: PLC0415
        from kc_otel.diagnose.kernel_sources import captured_by, engine_options  # noqa: PLC0415
        from kc_otel.diagnose.token_sequences import read_sequences  # noqa: PLC0415

        given = read_sequences(sequences, most=limit)
        options = engine_options(pairs("--engine", engine or ()))
        named = ", ".join([kernel, *([dtype] if dtype else []), *(f"{key}={each}" for key, each in options.items())])
        writer = CaptureWriter(out, named)
        left = [(index, each) for index, each in enumerate(given) if not writer.has(index, each.token_ids)]
        captured = captured_by(
            kernel,
            KernelSpec(engine="any", dtype=dtype),
            [each for _, each in left],
            precision=precision,
            options=options,
            decode=decode,
        )
        for (index, asked), sequence in zip(left, captured, strict=True):
            writer.write(index, asked.token_ids, sequence)
        writer.seal()
    typer.echo(f"{out}: {len(given)} sequences, {out.stat().st_size / 1e6:.1f} MB", err=True)


def _follow(contract: str, options: Sequence[str], url: str, by: str | None, budget: float) -> None:
    """Runs this command with `--incident` for each incident."""
    from kc_otel.cli.api_client import get  # noqa: PLC0415 - a quick --help
    from kc_otel.cli.locate_follow import Follower, give_way, run_within  # noqa: PLC0415
    from kc_otel.client.router import Router  # noqa: PLC0415

    if budget <= 0:
        refuse("--budget: 0s is over at once; write how long, such as 10m")
    with unusable():
        name = load(contract).name
        router = Router(url)
    log_to_terminal()
    give_way()
    with router, stopped_by_signals() as stop:
        Follower(
            lambda: router.to_locate(name),
            lambda: get(url, "/api/v1/incidents", contract=name)["incidents"],
            lambda one: run_within(["locate", contract, *options, "--incident", one], budget, stop),
            lambda one, why: attach(url, one, "locate", ALL, why, {}, by),
        ).run(stop)


def _is_capture(kernel: str) -> bool:
    from kc_otel.diagnose.capture_file import is_capture  # noqa: PLC0415 - a quick --help

    return is_capture(Path(kernel))


def _of_kernels(
    contract: Contract,
    train: str,
    infer: str,
    given: Sequence[TokenSequence],
    slice: str,
    clause: Clause | None,
    precision: str | None,
    options: Mapping[str, str],
    *,
    shares: bool,
) -> Located:
    from kc_otel.diagnose.kernel_sources import (  # noqa: PLC0415 - torch
        completed_by,
        engine_options,
        kernel_from,
        torch_kernel_from,
    )
    from kc_otel.diagnose.torch_locate import locate  # noqa: PLC0415

    reference = torch_kernel_from(train, contract.kernels.train)
    with kernel_from(infer, contract.kernels.inference, engine_options(options)) as kernel:
        tokens = completed_by(kernel, given, _DECODED)
        return locate(
            contract, reference, kernel, tokens, slice=slice, clause=clause, shares=shares, precision=precision
        )


def _of_captures(
    contract: Contract,
    train: str,
    infer: str,
    given: Sequence[TokenSequence],
    slice: str,
    precision: str | None,
    options: Mapping[str, str],
) -> Located:
    """At least one side is a capture: the other is captured on its tokens."""
    from kc_otel.diagnose.capture_compare import compare_captures  # noqa: PLC0415 - a quick --help
    from kc_otel.diagnose.capture_file import Capture, is_capture, read_capture  # noqa: PLC0415
    from kc_otel.diagnose.kernel_sources import captured_by, engine_options  # noqa: PLC0415
    from kc_otel.diagnose.token_sequences import TokenSequence  # noqa: PLC0415

    def side(kernel: str, spec: KernelSpec, tokens: Sequence[TokenSequence], rounding: str | None) -> Capture:
        if is_capture(Path(kernel)):
            return read_capture(Path(kernel))
        arguments = engine_options(options)
        return Capture(kernel, tuple(captured_by(kernel, spec, tokens, precision=rounding, options=arguments)))

    inference = side(infer, contract.kernels.inference, given, None)
    tokens = [TokenSequence(each.token_ids, each.prompt_tokens, {}, each.messages) for each in inference.sequences]
    reference = side(train, contract.kernels.train, tokens, precision or "bfloat16")
    return compare_captures(contract, reference, inference, slice=slice)


def _clause(contract: Contract, wanted: str | None) -> Clause | None:
    if wanted is None:
        return None
    found = next((each for each in contract.clauses if each.id == wanted), None)
    if found is not None:
        return found
    known = ", ".join(each.id for each in contract.clauses)
    return refuse(f"--clause: {wanted!r} is not in the contract; there are {known}")


def _show(located: Located, *, as_json: bool, html: Path | None) -> None:
    from kc_otel.diagnose.located import located_json  # noqa: PLC0415
    from kc_otel.diagnose.located_text import located_lines  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps(located_json(located), indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(located_lines(located)))
    if html is not None:
        from kc_otel.report.document import to_html  # noqa: PLC0415
        from kc_otel.report.located_report import located_blocks  # noqa: PLC0415

        with unusable():
            html.write_text(to_html(f"{located.contract}: located", located_blocks(located)), encoding="utf-8")
        typer.echo(f"written to {html}", err=True)
