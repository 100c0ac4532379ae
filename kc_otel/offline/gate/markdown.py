"""An offline gate as Markdown, for a job's summary or a review."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.sentences import scopes
from kc_otel.judge.promotion.stages import GateOutcome
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.findings import GateFinding, findings, for_whom, how_far, missing, notes
from kc_otel.offline.gate.recorded_gate import OfflineGate
from kc_otel.record.kernel import Kernel

_MARK: Final = {Status.FAIL: "❌", Status.INCONCLUSIVE: "❔", Status.NO_DATA: "❔", Status.PASS: "✅"}
_MAX_ROWS: Final = 200
"""Rows of a table; a job's summary has a size that CI systems cut it at."""
_MARKDOWN_CHARACTERS: Final = re.compile(r"([\\|<>`*_\[\]])")


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
        status = _MARK[verdict.status] + ("" if finding.required else " (not required)")
        rows.append(
            [
                status,
                safe(verdict.cell.clause),
                safe(for_whom(verdict.cell.slice)),
                f"{verdict.estimate:.4g}" if there else "-",
                f"{verdict.lower:.3g} to {_bound(verdict.upper)}" if there else "-",
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


def _bound(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "none"


def safe(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return _MARKDOWN_CHARACTERS.sub(r"\\\1", text.replace("\n", " "))
