"""People's orders to the evaluator: checked, stored with author and reason, then in force.

Every function takes the core first, `by` and `why`, and unix time in seconds last. Each raises a LookupError where what
is meant is not there, a ValueError where something is missing or wrong, and a StateError where it cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from kc_otel.contract.slices import ALL
from kc_otel.contract.words import listed, moment, named_place, place
from kc_otel.judge import decisions
from kc_otel.judge.cells import NO_PAIR
from kc_otel.judge.escalation.alerts import Acknowledgement, Alert, Silence
from kc_otel.judge.incidents.incident import OF_RECORDERS, Diagnosis, Incident
from kc_otel.judge.verdict import INPUT_CLAUSE, MEASURED
from kc_otel.serve.core import Core


def acknowledge(
    core: Core, contract: str, clause: str | None, slice: str | None, by: str, why: str, now: float
) -> tuple[Alert, ...]:
    """Acknowledge the alerts that fire for a clause on a slice, which ends their reminders; return them.

    What another person has acknowledged is taken over: at a change of shifts it changes hands.
    """
    known(core, contract, clause, slice)
    firing = core.policies[contract].firing
    meant = [alert for alert in firing if clause in {None, alert.cell.clause} and slice in {None, alert.cell.slice}]
    if not meant and (unproven := [row.id for row, inside in _unproven(core, contract, clause, slice) if any(inside)]):
        raise LookupError(
            f"no such alert fires; incident {unproven[0]} went away without proof of recovery, and `--close` closes it"
        )
    if not meant:
        raise LookupError("no such alert fires")
    owners = {ack.fingerprint: ack.by for ack in core.people.acknowledgements}
    taken = {alert.fingerprint: alert for alert in meant if owners.get(alert.fingerprint) != by}
    if not taken:
        raise LookupError(f"acknowledged already, by {by}")
    new = [Acknowledgement(contract, fingerprint, by, why, now) for fingerprint in taken]
    kept = [ack for ack in core.people.acknowledgements if ack.fingerprint not in taken]
    after = replace(core.people, acknowledgements=(*kept, *new))
    places = dict.fromkeys(f"{alert.cell.clause} on {place(alert.cell.slice)}" for alert in taken.values())
    done = f"acknowledged {listed(list(places))}"
    if former := sorted({owners[fingerprint] for fingerprint in taken if fingerprint in owners}):
        done += f", and took over from {listed(former)}"
    said = _word(by, done, why, clause=clause, slice=slice, fingerprints=sorted(ack.fingerprint for ack in new))
    core.amend(contract, {"acknowledged": said}, now, people=after)
    return tuple(taken.values())


def close(
    core: Core, contract: str, clause: str | None, slice: str | None, by: str, why: str, now: float
) -> tuple[Incident, ...]:
    """Close the incidents that went away without proof of recovery there, and nowhere else; return them.

    So does one that nothing has been measured of since: where its traffic never returns, its alert would fire for ever.
    """
    known(core, contract, clause, slice)
    found = _unproven(core, contract, clause, slice)
    closed = tuple(incident for incident, inside in found if all(inside))
    if not closed and (partly := [incident.id for incident, inside in found if any(inside)]):
        raise LookupError(f"incident {partly[0]} went away without proof elsewhere, too; close it as a whole")
    if not closed:
        raise LookupError("no incident there went away without proof of recovery")
    ids = [incident.id for incident in closed]
    said = _word(by, f"closed {listed([f'incident {id}' for id in ids])}", why, incidents=ids)
    core.amend(contract, {"closed": said}, now)
    return closed


def _unproven(core: Core, contract: str, clause: str | None, slice: str | None) -> list[tuple[Incident, list[bool]]]:
    """The incidents that went away without proof, and for each cell that no verdict has refuted if it is meant."""
    return [
        (
            incident,
            [
                clause in {None, cell.clause} and slice in {None, ALL, cell.slice}
                for cell in incident.cells
                if not cell.refuted
            ],
        )
        for incident in core.incidents(contract)
        if incident.went_away or _stopped(core, incident)
    ]


def _stopped(core: Core, incident: Incident) -> bool:
    """Return whether an incident lasts only because nothing is measured where it is broken."""
    measured = {
        verdict.cell.slice
        for verdict, _ in core.history.cells(incident.contract)
        if verdict.cell.pair == incident.pair and verdict.status in MEASURED
    }
    failing = core.evaluator.invalid_input(incident.contract, core.seen_at)
    if incident.on == "invalid-input" and not failing.keys().isdisjoint({incident.pair, NO_PAIR}):
        return False
    broken = {cell.slice for cell in incident.broken}
    return incident.on in OF_RECORDERS and bool(broken) and not broken & (measured | ({ALL} if measured else set()))


def silence(
    core: Core, contract: str, clause: str | None, slice: str | None, until: float, by: str, why: str, now: float
) -> Silence:
    """Silence the alerts of a clause on a slice until a Unix time; return the silence."""
    known(core, contract, clause, slice)
    if until <= now:
        raise ValueError("until: is not a time in the future; every silence has an end, such as 2h from now")
    made = Silence(secrets.token_hex(4), contract, clause, slice, by, why, now, until)
    after = replace(core.people, silences=(*core.people.silences, made))
    done = f"silenced {made.where} until {moment(until)}"
    said = _word(by, done, why, id=made.id, clause=clause, slice=slice, until=until)
    core.amend(contract, {"silenced": said}, now, people=after)
    return made


def unsilence(core: Core, id: str, by: str, why: str, now: float) -> Silence:
    """End a silence before its time; alerts that still fire are reported with the next evaluation. Returns it."""
    silences = {muting.id: muting for muting in core.people.silences}
    if (ended := silences.pop(id, None)) is None:
        raise LookupError(f"no silence {id!r} is in force; in force: {', '.join(silences) or 'none'}")
    after = replace(core.people, silences=tuple(silences.values()))
    done = f"ended the silence of {ended.where} by {ended.by}"
    said = _word(by, done, why, id=id, clause=ended.clause, slice=ended.slice)
    core.amend(ended.contract, {"unsilenced": said}, now, people=after)
    return ended


def pin(
    core: Core, contract: str, slice: str, kernel: str, until: float | None, by: str, why: str, now: float
) -> decisions.Pin:
    """A person decides which kernel serves a slice, whatever the policy routes. Returns the pin."""
    known(core, contract, None, slice)
    made = decisions.Pin(contract, slice, kernel, by, why, now, until)
    after = decisions.pin(core.decisions, decisions.as_defined(made, core.contracts[contract]))
    end = f" until {moment(until)}" if until is not None else ""
    said = _word(by, f"pinned {place(slice)} to {kernel}{end}", why, slice=slice, kernel=kernel, until=until)
    core.amend(contract, {"pinned": said}, now, decisions=after)
    return made


def lift(
    core: Core, kind: Literal["route", "pin"], contract: str, slice: str | None, by: str, why: str, now: float
) -> int:
    """End the route or pin of a slice, or every one of a contract for None; return their number."""
    after = decisions.lift(core.decisions, kind, contract, slice, now)
    ended = len(getattr(core.decisions, f"{kind}s")) - len(getattr(after, f"{kind}s"))
    where = "every slice" if slice is None else named_place(slice)
    event, done = ("unpinned", f"ended the pin of {where}") if kind == "pin" else ("resumed", f"resumed {where}")
    core.amend(contract, {event: _word(by, done, why, slice=slice)}, now, decisions=after)
    return ended


def diagnose(
    core: Core,
    id: str,
    kind: Literal["locate", "remedy"],
    slice: str,
    text: str,
    evidence: Mapping[str, Any],
    by: str,
    now: float,
) -> Diagnosis:
    """Attach a finding and its evidence to an incident, and return it."""
    incident = core.incident(id)
    if incident is None:
        raise LookupError(f"no incident {id[:40]!r}; /api/v1/incidents has those that are kept")
    known(core, incident.contract, None, slice)
    try:
        content = json.dumps(evidence, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise ValueError(
            "evidence: has a number that is not finite, or is too deep; write such numbers as text"
        ) from None
    found = Diagnosis(now, kind, slice, text, by, hashlib.sha256(content.encode()).hexdigest())
    core.diagnose(incident, found, content, now)
    return found


def _word(by: str, done: str, why: str, **fields: Any) -> dict[str, Any]:
    return {**fields, "by": by, "why": why, "message": f"{by} {done}: {why}"}


def known(core: Core, contract: str, clause: str | None = None, slice: str | None = None) -> None:
    """Raise a LookupError that names what there is, where one of them is unknown."""
    found = core.contracts.get(contract)
    if found is None:
        raise LookupError(f"no contract {contract!r}; there are {', '.join(core.contracts)}")
    clauses = [*(candidate.id for candidate in found.clauses), INPUT_CLAUSE]
    for kind, name, names in (("clause", clause, clauses), ("slice", slice, [ALL, *found.slices])):
        if name is not None and name not in names:
            raise LookupError(f"contract {contract} has no {kind} {name!r}; there are {', '.join(names)}")
