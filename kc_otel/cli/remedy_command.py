"""`kc-otel remedy`: the correction of the rollout mismatch that keeps a contract with the lowest variance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, IncidentId, Url, attach, failing_cell
from kc_otel.cli.terminal import By, Columns, PrintJson, columns_of, show, unusable
from kc_otel.contract.load import load
from kc_otel.contract.slices import STALE
from kc_otel.contract.words import number, place, table_lines
from kc_otel.judge.statistics import rounded
from kc_otel.offline import remedy as replays
from kc_otel.offline.corrections import TRAINERS, Trainer, line
from kc_otel.offline.remedy import CorrectionReplay, Remedy, RemedyBound, as_data
from kc_otel.recordings.recording_files import load_recording

_COSTS: Final = ("Slice", "Variance", "ESS", "Tokens dropped", "with A > 0", "with A < 0", "Sequences dropped")
_EXCEEDED: Final = {
    True: "Beyond their limits, and no correction changes that: {}. Remove the cause, or change the kernel.",
    False: "Estimated above their limits; this recording does not decide it, and no correction changes it: {}.",
}
"""Said of cells, by whether their lower bounds exceed the limit."""


def remedy(
    recording: Annotated[
        str,
        typer.Argument(metavar="RECORDING", help="Rollouts before any correction: a recording, or files of a trainer."),
    ],
    contract: Annotated[str, typer.Option(help="Contract that a correction must keep, on every slice.")],
    trainer: Annotated[list[str] | None, typer.Option(help="Only verl, trl, slime; repeatable.")] = None,
    columns: Columns = None,
    as_json: PrintJson = False,
    incident: IncidentId = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Replay the importance-sampling corrections of RL trainers on recorded rollouts, and print the line to paste.

    Tries every truncation, mask and rejection rule that a trainer has, over a grid of thresholds. Prints the remaining
    bias, the variance, the effective sample size and the share dropped, by slice and sign of the advantage.
    Exits with 0 if a trainer has a correction that keeps the contract; 1 if none is known to keep it, or if a limit
    that no correction changes is exceeded, even if only by an estimate; 2 if an argument cannot be used.

    Examples:
      kc-otel remedy rollouts.npz --contract policy.yaml
      kc-otel remedy rollouts.npz --contract policy.yaml --trainer verl --incident worst
    """
    with unusable():
        if unknown := [name for name in trainer or () if name not in TRAINERS]:
            raise ValueError(f"--trainer: {unknown[0]!r} is not known; write one of {', '.join(TRAINERS)}")
        wanted = tuple(known for known in TRAINERS if not trainer or known in trainer)
        promise = load(contract)
        cell = None if incident is None else failing_cell(url, promise, incident)
        found = replays.remedy(load_recording(recording, columns=columns_of(columns)), promise, wanted)
    show(remedy_lines(found), as_data(found), as_json=as_json)
    if cell is not None:
        text = remedy_sentence(found)
        typer.echo(attach(url, cell.incident, "remedy", cell.slice, text, as_data(found), by), err=True)
    if found.exceeded or not any(found.chosen.values()):
        raise typer.Exit(1)


def remedy_lines(of: Remedy) -> Iterator[str]:
    """Yield what to paste, what it costs, and what it leaves by slice."""
    all_traffic = of.replayed[0].costs["all"]
    yield f"Remedies for {of.source} under {of.contract}"
    yield (
        f"{len(of.replayed)} corrections replayed on {all_traffic.sequences:,} sequences, {all_traffic.tokens:,} "
        f"tokens. All intervals hold together with {100 * of.confidence:g} % confidence; each {of.unit} counts once"
        + (", as if independent of the others." if of.unit == "sequence" else ".")
    )
    yield from (said for warning in _warnings(of) for said in ("", warning))
    for trainer, chosen in of.chosen.items():
        yield from ("", trainer, _answer(of, trainer))
        if chosen is not None:
            yield line(trainer, chosen.correction) or ""
    for replay in of.replayed:
        if replay.meets and any(replay is chosen for chosen in of.chosen.values()):
            yield from (
                "",
                replay.correction.name,
                *table_lines(_COSTS, [_cost_row(name, replay) for name in replay.costs]),
            )
            yield from (f"- {_left(found)}" for found in replay.findings)
    if of.beyond:
        yield from ("", "No correction changes these", *(f"- {said}" for said in of.beyond))


def remedy_sentence(of: Remedy) -> str:
    """Return the answer in one line, for an incident's page and messages: what to paste for each trainer."""
    said = [f"{trainer}: {_answer(of, trainer)}" for trainer in of.chosen]
    said += [
        f"paste: {line(trainer, replay.correction)}" for trainer, replay in of.chosen.items() if replay is not None
    ]
    return " ".join([*_warnings(of), "; ".join(said)])


def _answer(of: Remedy, trainer: Trainer) -> str:
    if not of.promises:
        return "The contract has no clause that a correction can affect; add one on tv_token, tv_seq or reward drift."
    chosen = of.chosen[trainer]
    if chosen is not None:
        limits = f"{'the' if of.beyond else 'all'} {len(of.promises)} limits" if len(of.promises) > 1 else "the limit"
        limits += " that a correction can change," * bool(of.beyond)
        return f"{chosen.correction.name} keeps {limits} with the lowest variance."
    near = of.closest[trainer]
    assert near.worst is not None
    name = near.correction.name
    none = "No correction is known to keep" if trainer in of.lacking else "No correction keeps"
    return f"{none} the contract. The closest is {name}: {_left(near.worst)}; {_why(of, trainer, near.worst)}."


def _warnings(of: Remedy) -> Iterator[str]:
    """Yield limits that no correction keeps, empty slices, what older weights sampled, notes on the recording."""
    for proven, said in _EXCEEDED.items():
        if cells := [
            f"{found.cell.clause} on {place(found.cell.slice)} {number(found.estimate)}, limit {number(found.limit)}"
            for found in of.exceeded
            if (found.lower > found.limit) is proven
        ]:
            yield said.format("; ".join(cells))
    if of.empty:
        slices = ", ".join(map(place, of.empty))
        yield f"No whole sequence of this recording is in {slices}: no correction is decided there."
    if older := of.replayed[0].costs.get(STALE):
        yield (
            f"{older.sequences:,} more sequences, {older.tokens:,} tokens, are slice stale: older weights sampled them,"
            " or a part of each. A trainer corrects them too, but the costs on all traffic leave them out."
        )
    yield from of.notes


def _why(of: Remedy, trainer: Trainer, worst: RemedyBound) -> str:
    if trainer not in of.lacking:
        return "the limit is exceeded"
    if not worst.interval.samples:
        return "this recording does not decide it"
    more = of.lacking[trainer]
    decided = "and more" if more is None else f"but at most {rounded(more):,} more"
    these = f"{of.unit}s like these on {place(worst.promise.slice)}"
    return f"this recording does not decide it, {decided} {these} would{' not' * (more is None)}"


def _left(of: RemedyBound) -> str:
    """Return the drift that is left under a clause: `tv on tables 0.012 [0.01, 0.015], limit 0.02`."""
    said = number(of.interval.estimate) if of.interval.samples else "without data"
    if of.interval.samples and of.interval.lower < of.interval.upper:
        said += f" [{number(of.interval.lower)}, {number(of.interval.upper)}]"
    return f"{of.promise.clause} on {place(of.promise.slice)} {said}, limit {number(of.promise.limit)}"


def _cost_row(name: str, of: CorrectionReplay) -> tuple[str, ...]:
    costs = of.costs[name]
    dropped = (costs.dropped, costs.dropped_positive, costs.dropped_negative, costs.dropped_sequences)
    return (place(name), number(costs.variance), *map(_percent, (costs.ess, *dropped)))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{number(100 * share)} %"
