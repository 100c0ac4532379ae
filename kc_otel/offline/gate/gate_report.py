"""An offline gate as findings, worst first, as Markdown for a job's summary, and as JUnit XML.

In the XML an undecided clause is skipped: the exit code tells a gate that waits from one that opens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import PurePosixPath
from typing import Final
from xml.etree import ElementTree as ET

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.sentences import scopes
from kc_otel.contract.slices import ALL
from kc_otel.judge.promotion.stages import GateOutcome
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_gate import GatedRecording, OfflineGate
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts
from kc_otel.record.kernel import Kernel

_WORST_FIRST: Final = (Status.FAIL, Status.INCONCLUSIVE, Status.NO_DATA, Status.PASS)
_MARK: Final = {Status.FAIL: "❌", Status.INCONCLUSIVE: "❔", Status.NO_DATA: "❔", Status.PASS: "✅"}
_MAX_ROWS: Final = 200
"""Rows of a table; a job's summary has a size that CI systems cut it at."""
_MARKDOWN_CHARACTERS: Final = re.compile(r"([\\|<>`*_\[\]])")
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class GateFinding:
    """A verdict on a recording, and whether the gate asks for its PASS."""

    verdict: Verdict
    input: GatedRecording
    required: bool


def findings(gate: OfflineGate) -> tuple[GateFinding, ...]:
    """Every verdict: failures by excess, then undecided ones, then passes with the smallest margin first."""
    terms = gate.terms
    found = [
        GateFinding(
            verdict,
            about,
            (not terms.require or verdict.cell.clause in terms.require)
            and (not terms.slices or verdict.cell.slice in terms.slices),
        )
        for about, judged in zip(gate.inputs, gate.judged, strict=True)
        for verdict in judged.verdicts
    ]
    return tuple(sorted(found, key=_badness))


def how_far(verdict: Verdict) -> str:
    """Say by what factor a limit is exceeded or kept, from the bound that decided."""
    if verdict.status is Status.NO_DATA:
        return ""
    if verdict.status is Status.FAIL:
        if verdict.limit > 0:
            return f"at least {_times(verdict.lower / verdict.limit)} the limit"
        return f"at least {verdict.lower - verdict.limit:.3g} above the limit"
    if not math.isfinite(verdict.upper):
        return "no upper bound"
    if verdict.limit > 0:
        return f"at most {_times(max(verdict.upper, 0.0) / verdict.limit)} the limit"
    return f"at most {verdict.upper - verdict.limit:.3g} above the limit"


def missing(gate: OfflineGate) -> tuple[str, ...]:
    """Return what the gate waits for. Whether a single window has passed, its verdicts say."""
    return tuple(
        reason for reason in gate.decision.missing if len(gate.inputs) > 1 or "windows have passed" not in reason
    )


def for_whom(slice: str) -> str:
    """A slice in words."""
    return "all traffic" if slice == ALL else f"slice {slice}"


def notes(gate: OfflineGate) -> tuple[str, ...]:
    """Return notes for the reader besides the verdicts."""
    said = [
        f"{rec.name}: {note}"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        for note in _notes_on(gate.contract, rec, judged)
    ]
    if gate.terms.sequential:
        said.append("bounds hold at every number of sequences at once: the gate may stop as soon as it is decided")
    for names, other in ((gate.terms.require, "of any other clause"), (gate.terms.slices, "on any other slice")):
        if names:
            said.append(f"only {', '.join(names)} had to pass; a failure {other} still rejects the kernel")
    return tuple(said)


def _notes_on(contract: Contract, rec: GatedRecording, judged: RecordingVerdicts) -> Iterator[str]:
    if rec.identical:
        yield (
            "both sides have the same number at every token; unless the kernels agree bit for bit, one side is a copy "
            "of the other"
        )
    if rec.coarse:
        yield str(rec.coarse)
    if rec.unchecked:
        yield rec.unchecked
    if rec.repeated:
        yield (
            f"{rec.repeated:,} of {rec.repeated + rec.sequences:,} sequences repeat others, in whole or in part: the "
            f"same tokens or nearly the same log-probabilities; each counts once, so the gate decides on "
            f"{rec.sequences:,}"
        )
    span = contract.assumptions.reward_range
    if judged.unknown_rewards and span is not None:
        yield (
            f"{judged.unknown_rewards:,} of {rec.sequences:,} rewards are missing or outside of "
            f"assumptions.reward_range [{span[0]:g}, {span[1]:g}] and count as the worst possible value; record all "
            f"rewards, and correct the range"
        )
    if rec.sampling:
        yield "sampled with " + ", ".join(f"{name} {'/'.join(map(str, of))}" for name, of in rec.sampling.items())
    for of in judged.causes:
        share = f"{100 * of.share:.3g} %"
        yield f"{of.clause}: {share} was sampled by older weights and is not held against the kernels; {of.text}"
    if judged.age_note:
        yield judged.age_note
    if note := judged.prompts_note(contract):
        yield note


def _badness(finding: GateFinding) -> tuple[int, bool, float, str, str, str]:
    verdict = finding.verdict
    bound = verdict.lower if verdict.status is Status.FAIL else verdict.upper
    over = bound / verdict.limit if verdict.limit > 0 else bound - verdict.limit
    cell = verdict.cell
    rank = _WORST_FIRST.index(verdict.status)
    return rank, not finding.required, 0.0 if math.isnan(over) else -over, cell.clause, cell.slice, finding.input.name


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor >= 0.01 or factor == 0 else f"{factor:.1g} times"


def headline(gate: OfflineGate) -> str:
    """The decision in one sentence: the slice that is hurt most, and by how much."""
    version, found = f"{gate.inference.engine} {gate.inference.fingerprint}", findings(gate)
    contract = f"{gate.contract.name} v{gate.contract.metadata.version}"
    if gate.decision.outcome is GateOutcome.ROLLBACK:
        worst, failed = found[0].verdict, sum(finding.verdict.status is Status.FAIL for finding in found)
        more = f"; {failed} verdicts failed in all" if failed > 1 else ""
        return (
            f"{version} breaks {contract}: {worst.cell.clause} on {for_whom(worst.cell.slice)} is "
            f"{how_far(worst)} of {worst.limit:.4g}{more}"
        )
    if gate.decision.outcome is GateOutcome.WAIT:
        return f"{version} cannot be decided under {contract}: {_waits_for(gate, found)}"
    unjudged = f"; not judged: {', '.join(clause.clause for clause in gate.unjudged)}" if gate.unjudged else ""
    return f"{version} keeps {contract} and may go on to {gate.decision.stage}{unjudged}"


def _waits_for(gate: OfflineGate, found: Sequence[GateFinding]) -> str:
    required = [finding.verdict for finding in found if finding.required]
    above = [verdict for verdict in required if verdict.status is not Status.FAIL and verdict.lower > verdict.limit]
    open_ = sum(verdict.status is not Status.PASS for verdict in required)
    said = f"{open_} of {len(required)} verdicts do not PASS yet" if open_ else missing(gate)[0]
    for worst in sorted(above, key=lambda verdict: verdict.limit - verdict.lower)[:1]:
        clause = next(clause for clause in gate.contract.clauses if clause.id == worst.cell.clause)
        few = samples_needed(clause, gate.contract.observability) - worst.samples
        unit = clause.quantity.per if clause.quantity is not None else Unit.TOKEN
        more = f"; a FAIL requires {few:,} more {unit}{'s' * (few != 1)}" if few > 0 else ""
        far = how_far(replace(worst, status=Status.FAIL))
        said += f", and {worst.cell.clause} on {for_whom(worst.cell.slice)} is {far} of {worst.limit:.4g} so far{more}"
    return said


def markdown(gate: OfflineGate) -> str:
    """The gate as a Markdown document: the decision, the verdicts worst first, what is missing, what it rests on."""
    open_ = gate.decision.outcome is GateOutcome.ADVANCE
    mark = "✅" if open_ else "❌" if gate.decision.outcome is GateOutcome.ROLLBACK else "⏸️"
    found = findings(gate)
    lines = [f"## {mark} {safe(headline(gate))}", ""]
    if gate.decision.outcome is GateOutcome.WAIT:
        lines += ["**What is missing**", "", *(f"- {safe(reason)}" for reason in missing(gate)), ""]
    bad = [finding for finding in found if finding.verdict.status is not Status.PASS]
    good = [finding for finding in found if finding.verdict.status is Status.PASS]
    if bad:
        lines += [*_table(gate, bad), ""]
    if good:
        count = f"{len(good)} verdict{'s' * (len(good) != 1)} passed"
        lines += [
            "<details>",
            f"<summary>{count}, smallest margin first</summary>",
            "",
            *_table(gate, good),
            "",
            "</details>",
            "",
        ]
    if gate.unjudged:
        lines += ["**Not judged**", "", *(f"- {safe(str(clause))}" for clause in gate.unjudged), ""]
    lines += [*(f"> {safe(note)}" for note in notes(gate)), ""] if notes(gate) else []
    abouts = {finding.verdict.cell.clause: finding.verdict.about for finding in found}
    lines += [*(f"- Verdicts {safe(scope)}" for scope in scopes(abouts)), ""] if abouts else []
    return "\n".join([*lines, *_about(gate)]) + "\n"


def _table(gate: OfflineGate, found: Sequence[GateFinding]) -> list[str]:
    several = len(gate.inputs) > 1
    heads = ["", "Clause", "For", "Observed", "Interval", "Limit", "How far", "From", *(["Recording"] * several)]
    rows = [heads, ["---"] * len(heads)]
    for finding in found[:_MAX_ROWS]:
        verdict = finding.verdict
        there = math.isfinite(verdict.estimate)
        upper = f"{verdict.upper:.3g}" if math.isfinite(verdict.upper) else "none"
        status = _MARK[verdict.status] + ("" if finding.required else " (not required)")
        rows.append(
            [
                status,
                safe(verdict.cell.clause),
                safe(for_whom(verdict.cell.slice)),
                f"{verdict.estimate:.4g}" if there else "-",
                f"{verdict.lower:.3g} to {upper}" if there else "-",
                f"{verdict.limit:.4g}",
                how_far(verdict) or "-",
                _sample(gate, verdict) if there else "nothing",
                *([safe(finding.input.name)] * several),
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [*lines, "", f"and {len(found) - _MAX_ROWS} more"] if len(found) > _MAX_ROWS else lines


def _sample(gate: OfflineGate, verdict: Verdict) -> str:
    clause = next(candidate for candidate in gate.contract.clauses if candidate.id == verdict.cell.clause)
    unit = clause.quantity.per if clause.quantity is not None else Unit.TOKEN
    return f"{verdict.samples:,} {unit}{'s' * (verdict.samples != 1)}"


def _about(gate: OfflineGate) -> list[str]:
    return [
        "<details>",
        "<summary>What this rests on</summary>",
        "",
        f"- Contract {safe(gate.contract.name)} v{gate.contract.metadata.version}, `{gate.contract.hash}`",
        f"- Training kernel {_kernel(gate.train)}",
        f"- Inference kernel {_kernel(gate.inference)}",
        *(
            f"- {safe(about.name)}: {about.sequences:,} sequences, {about.tokens:,} tokens, sha256 `{about.sha256}`"
            for about in gate.inputs
        ),
        f"- Confidence {100 * gate.contract.observability.confidence:g}%: of each PASS, and against any FAIL by chance",
        "",
        "</details>",
    ]


def _kernel(kernel: Kernel) -> str:
    fields = ", ".join(f"{name} {value}" for name, value in kernel.to_plain().items())
    return f"`{kernel.fingerprint}`: {safe(fields)}"


def safe(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return _MARKDOWN_CHARACTERS.sub(r"\\\1", text.replace("\n", " "))


def junit(gate: OfflineGate) -> str:
    """The gate as an XML document: one suite per recording, and one of the clauses that none can be judged by."""
    found, name = findings(gate), gate.contract.name
    cases = {
        about.name: [_judged(name, finding) for finding in found if finding.input is about] for about in gate.inputs
    }
    if gate.unjudged:
        cases["not judged"] = [_case(name, clause.clause, clause.clause) for clause in gate.unjudged]
        for case, clause in zip(cases["not judged"], gate.unjudged, strict=True):
            ET.SubElement(case, "skipped", message=_text(f"not judged: {clause.why}"))
    counts = _counts([*chain.from_iterable(cases.values())])
    root = ET.Element("testsuites", {"name": _text(f"kernel contract {name}"), **counts})
    at = datetime.fromtimestamp(gate.at, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    about = {"decision": gate.decision.outcome.value, "contract.hash": gate.contract.hash}
    about |= {"kernel.train": gate.train.fingerprint, "kernel.inference": gate.inference.fingerprint}
    for recording, of in cases.items():
        title = _text(f"{name}: {PurePosixPath(recording).name}")
        suite = ET.SubElement(root, "testsuite", {"name": title, "timestamp": at, **_counts(of)})
        properties = ET.SubElement(suite, "properties")
        for key, value in about.items():
            ET.SubElement(properties, "property", name=key, value=value)
        suite.extend(of)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _counts(cases: Sequence[ET.Element]) -> dict[str, str]:
    failed, skipped = (sum(case.find(tag) is not None for case in cases) for tag in ("failure", "skipped"))
    return {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(skipped), "time": "0"}


def _judged(contract: str, finding: GateFinding) -> ET.Element:
    verdict = finding.verdict
    case = _case(contract, verdict.cell.clause, f"{verdict.cell.clause} on {verdict.cell.slice}")
    if verdict.status is Status.FAIL:
        about = ET.SubElement(case, "failure", message=_text(f"{verdict.reason}; {how_far(verdict)}"), type="FAIL")
        about.text = _text(
            f"estimate {verdict.estimate:.6g}, between {verdict.lower:.6g} and {verdict.upper:.6g}, limit "
            f"{verdict.limit:.6g}, {verdict.samples:,} observations, {verdict.method}, {finding.input.name}"
        )
    elif verdict.status is not Status.PASS:
        ET.SubElement(case, "skipped", message=_text(f"{verdict.status}: {verdict.reason}"))
    return case


def _case(contract: str, clause: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=_text(f"{contract}.{clause}"), name=_text(name), time="0")


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
