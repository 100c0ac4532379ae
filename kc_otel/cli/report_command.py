"""`kc-otel report`: a period of a running evaluator, or a gate's evidence, as one file to attach to something."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get
from kc_otel.cli.terminal import refuse, seconds

if TYPE_CHECKING:
    from kc_otel.report.document import Block
    from kc_otel.report.period_report import Period

__all__ = ["register"]

_EVENTS: Final = 10_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    url: Url = DEFAULT_URL,
    contract: Annotated[str | None, typer.Option(help="Only this contract.")] = None,
    since: Annotated[str, typer.Option(help="How far back: 30m, 24h, 7d.")] = "24h",
    evidence: Annotated[
        Path | None, typer.Option(help="Report a gate instead: the file that `kc-otel gate run --evidence` wrote.")
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help="File to write, .html or .md; may be given twice. [default: report.html]")
    ] = None,
) -> None:
    """Write what broke, when, for whom and what was done: one self-contained HTML file, or Markdown."""
    from kc_otel.report.document import Heading, to_html, to_markdown  # noqa: PLC0415 - a quick --help

    targets = out or [Path("report.html")]
    for target in targets:
        if target.suffix not in {".html", ".md"}:
            refuse(f"--out: {target} is neither HTML nor Markdown; give it a name that ends in .html or .md")
    blocks = _of_evidence(evidence) if evidence is not None else _of_period(url, contract, since)
    title = next(block.text for block in blocks if isinstance(block, Heading))
    for target in targets:
        text = to_html(title, blocks) if target.suffix == ".html" else to_markdown(blocks)
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            refuse(f"{target}: cannot be written ({error.strerror})")
        typer.echo(f"{target}: {title}")


def _of_evidence(path: Path) -> tuple[Block, ...]:
    from kc_otel.offline.gate.evidence_files import read_evidence  # noqa: PLC0415 - a quick --help
    from kc_otel.report.gate_report import gate_blocks  # noqa: PLC0415

    try:
        return gate_blocks(read_evidence(path))
    except OSError as error:
        refuse(f"{path}: cannot be read ({error.strerror})")
    except ValueError as error:
        refuse(f"{path}: {error}")


def _of_period(url: str, contract: str | None, since: str) -> tuple[Block, ...]:
    from kc_otel.report.period_report import period_blocks  # noqa: PLC0415 - a quick --help

    return period_blocks(_asked(url, contract, seconds("--since", since)))


def _asked(url: str, contract: str | None, lasting: float) -> Period:
    """Everything that a report says, from the evaluator's API."""
    from dataclasses import replace  # noqa: PLC0415 - a quick --help

    from kc_otel.report.period_report import Period, located_last, wanted_cells  # noqa: PLC0415

    only = {"contract": contract} if contract else {}
    end = time.time()
    contracts = [
        one for one in get(url, "/api/v1/contracts")["contracts"] if contract is None or one["name"] == contract
    ]
    if not contracts:
        refuse(f"--contract: {contract} is not served at {url}")
    decisions = get(url, "/api/v1/decisions")
    events = get(url, "/api/v1/events", newest=_EVENTS, **only)["events"]
    found = Period(
        start=end - lasting,
        end=end,
        source=url,
        version=version("kc-otel"),
        contracts=contracts,
        cells=get(url, "/api/v1/cells", glances=0, **only)["cells"],
        events=events,
        decisions=decisions
        | {
            name: [one for one in decisions[name] if contract is None or one["contract"] == contract]
            for name in ("routes", "directives")
        },
        in_force=[
            one for one in get(url, "/api/v1/overview")["in_force"] if contract is None or one["contract"] == contract
        ],
        health=get(url, "/api/v1/health"),
        incidents=[
            get(url, f"/api/v1/incidents/{one['id']}")
            for one in get(url, "/api/v1/incidents", since=repr(end - lasting), **only)["incidents"]
        ],
        complete=len(events) < _EVENTS or events[0]["at"] <= end - lasting,
    )
    steps: dict[str, float] = {}
    histories: dict[Any, Any] = {}
    distributions: dict[Any, Any] = {}
    for key in wanted_cells(found):
        at = dict(zip(("contract", "clause", "slice"), key, strict=False))
        kernels = {"kernel_train": key[3], "kernel_inference": key[4]}
        past = get(url, "/api/v1/history", **at, **{"from": str(found.start)})
        steps[key[0]] = past["step"]
        for series in past["series"]:
            if {name: series[name] for name in kernels} == kernels:
                histories[key] = series["points"]
        distributions[key] = get(url, "/api/v1/distribution", **at, **kernels)
    evidence = {
        digest: get(url, f"/api/v1/incidents/{one['id']}/diagnoses/{digest}")
        for one in found.incidents
        if (digest := located_last(one))
    }
    return replace(found, steps=steps, histories=histories, distributions=distributions, evidence=evidence)
