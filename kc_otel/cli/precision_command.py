"""`kc-otel precision`: in which formats a model can be served within its contract, and what to keep in 16 bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kc_otel._extras import extra
from kc_otel.cli.api_client import DEFAULT_URL, Url
from kc_otel.cli.incident_findings import By, IncidentId, attach, failing_cell
from kc_otel.cli.terminal import PrintJson, refuse, unusable
from kc_otel.contract.load import load

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract
    from kc_otel.offline.remedy.precision import Component, RunKept

__all__ = ["register"]

_BY = ("layer", "operator", "matrix")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("precision")(precision)


def precision(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="Contract that the served kernel has to keep.")],
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL",
            help="The training kernel, a checkpoint's folder or FILE.py:NAME; with --own FILE.py:NAME of a function "
            "that returns (components, run).",
        ),
    ],
    own: Annotated[bool, typer.Option("--own", help="KERNEL runs itself, as an engine of your own does.")] = False,
    sequences: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts to continue, as for locate; half are kept for the end.")
    ] = None,
    format: Annotated[
        list[str] | None, typer.Option(help="int8, int8-g128, w8a8, int4, int4-g128, int4-g32, fp8-e4m3, fp8-e5m2.")
    ] = None,
    quantized: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A checkpoint that a tool has quantised: GPTQ, AWQ, compressed-tensors."),
    ] = None,
    kv: Annotated[str | None, typer.Option(help="KV cache in fp8-e4m3 or fp8-e5m2.")] = None,
    kv_tokens: Annotated[int, typer.Option(min=0, help="Tokens that the cache holds, for what it costs.")] = 0,
    by: Annotated[str, typer.Option(help="Keep together: layer, operator or matrix.")] = "layer",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample for each prompt.")] = 48,
    limit: Annotated[int, typer.Option(min=2, metavar="SEQUENCES", help="The first so many prompts.")] = 256,
    runs: Annotated[int, typer.Option(min=2, help="Runs of the gate for each candidate.")] = 100,
    as_json: PrintJson = False,
    incident: IncidentId = None,
    signed: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """The cheapest layers, operators or matrices to keep in 16 bits so that every clause passes on every slice.

    Each candidate is sampled from and judged by the gate with nothing kept, with each component kept alone, and with
    sets of them; the set that is found is judged again on prompts that the search has not seen. Exits with 0 where a
    candidate passes, with 1 where none does.
    """
    from kc_otel.offline.remedy.precision import cheapest  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.remedy.precision_text import (  # noqa: PLC0415
        precision_json,
        precision_lines,
        precision_sentence,
        smallest,
    )

    if by not in _BY:
        refuse(f"--by: {by!r} is none of {', '.join(_BY)}")
    found = {}
    with unusable(ModuleNotFoundError, TypeError):
        promise = load(contract)
        cell = None if incident is None else failing_cell(url, promise, incident)
        options = {"by": by, "kv": kv, "kv_tokens": kv_tokens, "tokens": tokens}
        formats = format or (["int8"] if quantized is None else [])
        candidates = (
            _own(kernel) if own else _candidates(promise, kernel, sequences, limit, formats, quantized, options)
        )
        for name, base, components, run in candidates:
            whole = run(frozenset(each.name for each in components), False)
            if short := [one for one in whole if one.status != "PASS"]:
                refuse(
                    f"{name}: with everything in 16 bits {short[0].cell.clause} on {short[0].cell.slice} is already "
                    f"{short[0].status}: {short[0].reason}. Give more sequences or tokens; or it is not the bits"
                )
            found[name] = (base, cheapest(components, run, most=max(runs, len(components) + 1)))
            if not as_json:
                typer.echo("\n".join(precision_lines(name, found[name][1])))
    best = smallest(found)
    evidence: dict[str, Any] = {"chosen": best, "candidates": precision_json({k: one for k, (_, one) in found.items()})}
    if as_json:
        typer.echo(json.dumps(evidence, indent=2, allow_nan=False))
    elif best is not None and len(found) > 1:
        typer.echo(f"least memory: {precision_sentence(best, found[best][1])}")
    if cell is not None:
        said = "; ".join(precision_sentence(name, found[name][1]) for name in ([best] if best else found))
        typer.echo(attach(url, cell.incident, "remedy", cell.slice, said, evidence, signed), err=True)
    if best is None:
        raise typer.Exit(1)


def _candidates(
    contract: Contract,
    kernel: str,
    sequences: str | None,
    limit: int,
    formats: list[str],
    quantized: str | None,
    options: dict[str, Any],
) -> Iterator[tuple[str, int, list[Component], RunKept]]:
    """Name, memory with nothing kept, components and runs of each candidate."""
    with extra("torch", "a precision plan"):
        import torch  # noqa: PLC0415 - a quick --help

    from kc_otel.diagnose.checkpoint_folder import quantized_matrices  # noqa: PLC0415
    from kc_otel.diagnose.kernel_sources import torch_kernel_from  # noqa: PLC0415
    from kc_otel.diagnose.token_sequences import read_sequences  # noqa: PLC0415
    from kc_otel.diagnose.torch_formats import FORMATS, KV_FORMATS  # noqa: PLC0415
    from kc_otel.diagnose.torch_serving import ServedInLess  # noqa: PLC0415

    for name, known, option in [(each, FORMATS, "--format") for each in formats] + [
        (options["kv"], KV_FORMATS, "--kv")
    ]:
        if name is not None and name not in known:
            hint = "; GPTQ and AWQ are their tools' to make: give what they wrote with --quantized"
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}{hint if option == '--format' else ''}")
    if sequences is None:
        raise ValueError("--sequences: give prompts of the contract's traffic")
    train = torch_kernel_from(kernel, contract.kernels.train)
    given = read_sequences(sequences, contract=contract, most=limit)
    kv = KV_FORMATS.get(options["kv"])
    plain = getattr(torch, contract.kernels.inference.dtype or "", None)
    dtype = plain if isinstance(plain, torch.dtype) and plain.itemsize > 1 else torch.bfloat16
    more = {**options, "kv": kv, "dtype": dtype}
    named: list[tuple[str, Any]] = [(each, (FORMATS[each], None)) for each in formats]
    named += [(quantized, quantized_matrices(quantized))] if quantized else []
    for name, (format, matrices) in named:
        served = ServedInLess(contract, train, given, format, matrices=matrices, **more)
        yield f"{name}, KV cache {options['kv']}" if kv else name, served.bytes, served.components, served


def _own(kernel: str) -> Iterator[tuple[str, int, list[Component], RunKept]]:
    """The candidate that a function of a program returns."""
    from kc_otel.offline.python_names import python_name  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.remedy.precision import Component  # noqa: PLC0415

    what = "a function that returns (components, run) of kc_otel.offline.remedy.precision"
    found = python_name(kernel, what)
    made = found() if callable(found) else found
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
        raise ValueError(f"{kernel}: is not {what}")
    if not all(isinstance(each, Component) for each in made[0]):
        raise ValueError(f"{kernel}: components: {type(made[0][0]).__name__} is not a Component")
    yield kernel.rpartition(":")[2], 0, list(made[0]), made[1]
