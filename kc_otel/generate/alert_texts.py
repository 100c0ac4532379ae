"""Alerts in words and labels that every alerting system shares: the escalation policy's, and those of every contract.

The policy's are one per step and clause. No ladder waits for the others: no evaluator lives, a version was rolled back,
a breach is unproven, points are not judged. That no evaluator lives is seen by its own time of judging: gone from the
scrape, never scraped, hung and no longer pushing are the same for users of verdicts. The others fire on a state that
lasts until it is known to be over.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.policy import EscalationStep
from kc_otel.contract.registry.own_metrics import INVALID_ONCE, label, metric, selector
from kc_otel.contract.sentences import consequence, kept_away, promise, remedy_of
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import MEASURED_LATER
from kc_otel.generate.files import (
    EVALUATED_ID,
    HEALTH_UID,
    MISSING_ID,
    NOT_HOLDING_ID,
    NOWHERE,
    OVERVIEW_UID,
    PROMOTION_UID,
    STAGE_ID,
    Sites,
    overview_link,
)
from kc_otel.judge.escalation.webhook_body import ROLLED_BACK_ALERT
from kc_otel.judge.verdict import FAULTS, INPUT_CLAUSE, Status

CELL_LABELS: Final = tuple(label(name) for name in ("kc.slice", "kc.kernel.train", "kc.kernel.inference"))


@dataclass(frozen=True, slots=True)
class AlertStep:
    """One step of the policy, numbered from 1, for one clause; None for invalid input, which no clause owns."""

    contract: Contract
    clause: Clause | None
    number: int
    step: EscalationStep

    @property
    def name(self) -> str:
        """Name of the alert, as in the evaluator's webhooks."""
        return FAULTS[self.step.on].alert

    @property
    def key(self) -> str:
        """16 hex digits that identify the alert; they change when contract, clause or place do."""
        identity = f"{self.contract.name}/{self.clause_id}/{self.number}"
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def clause_id(self) -> str:
        """Identity of the clause, or the name under which the policy files invalid input."""
        return INPUT_CLAUSE if self.clause is None else self.clause.id

    @property
    def status(self) -> Status | None:
        """Verdict that the step waits for; None when it waits for invalid input."""
        return None if self.step.on == "invalid-input" else FAULTS[self.step.on].status

    @property
    def value(self) -> str:
        """PromQL: the verdict of every cell, or sequences of each pair that failed input checks."""
        if self.clause is not None:
            return f"max by ({', '.join(CELL_LABELS)}) ({self.verdicts})"
        return self.failed(selector("kc.evaluator.last_evaluation", {"kc.contract": self.contract.name}))

    def failed(self, heard: str = "") -> str:
        """PromQL: sequences of each pair that failed input checks in the window.

        `increase` does not count the first value of a series that appears, such as of a job that ends with it. It is
        counted, if there is a series that Prometheus has `heard` before the window: one without history knows nothing.
        """
        window = format_duration(self.contract.observability.window)
        failed = selector("kc.input.invalid", {"kc.contract": self.contract.name}, INVALID_ONCE)
        earlier = f"[1d] offset {window})"
        first = f"last_over_time({failed}[{window}]) unless last_over_time({failed}{earlier}"
        first += f" and on () last_over_time({heard}{earlier}" * bool(heard)
        return f"sum by ({', '.join(CELL_LABELS[1:])}) (({first}) or increase({failed}[{window}]))"

    @property
    def verdicts(self) -> str:
        """PromQL: the series of `kc.verdict` that the alert looks at."""
        return selector("kc.verdict", {"kc.contract": self.contract.name, "kc.clause": self.clause_id})

    @property
    def excused(self) -> str:
        """PromQL: the cells without data whose requests are kept from the kernel, as ordered."""
        return selector("kc.verdict.no_traffic", {"kc.contract": self.contract.name, "kc.clause": self.clause_id})

    @property
    def incident(self) -> str:
        """PromQL: the kernels of open incidents of the step's kind."""
        matchers = {"kc.contract": self.contract.name, "kc.incident.on": self.step.on}
        return f"on ({', '.join(CELL_LABELS[1:])}) {selector('kc.incident', matchers)}"

    @property
    def promise(self) -> str:
        """Promise of the clause, as a sentence."""
        if self.clause is None:
            return (
                "Sequences have to pass the input checks before they are measured: same token ids, no one-token "
                f"shift, no NaN, same sampling. {metric('kc.input.invalid')} counts those that do not, by reason."
            )
        return promise(self.clause, tuple(self.contract.slices))


def alert_steps(contract: Contract) -> tuple[AlertStep, ...]:
    """Every alert of a contract: clauses in their order, and for each the steps in theirs; invalid input last."""
    steps = tuple(enumerate(contract.escalation, start=1))
    of_clauses = (
        AlertStep(contract, clause, number, step)
        for clause in contract.clauses
        for number, step in steps
        if step.on != "invalid-input" and (not step.clauses or clause.id in step.clauses)
    )
    of_input = (AlertStep(contract, None, number, step) for number, step in steps if step.on == "invalid-input")
    return (*of_clauses, *of_input)


def static_labels(alert: AlertStep) -> dict[str, str]:
    """Labels that do not depend on the cell, named as in the evaluator's webhooks, and the step's place."""
    return {
        "contract": alert.contract.name,
        "clause": alert.clause_id,
        "severity": alert.step.severity,
        "step": str(alert.number),
    }


def cell_labels(alert: AlertStep, of: Callable[[str], str]) -> dict[str, str]:
    """Every label of an alert, where `of` is a template of the label that it is given."""
    slice, train, inference = map(of, CELL_LABELS)
    cell = {"slice": ALL if alert.clause is None else slice, "kernel_train": train, "kernel_inference": inference}
    return {**static_labels(alert), **cell}


def pair_template(label: str) -> str:
    """Return a template of the known kernels of a cell; `label` is a template of the label whose name replaces `{}`."""
    _, train, inference = map(label.format, CELL_LABELS)
    of, against = f"{{{{ with {inference} }}}} for {{{{ . }}}}", f"{{{{ with {train} }}}} against {{{{ . }}}}"
    return f"{of}{{{{ end }}}}{against}{{{{ end }}}}"


_NOT_REFUTED: Final = "Nothing has refuted the breach, though the last verdict may no longer show it."
_UNLESS_DONE: Final = ", unless that was done"
_AVERAGED: Final = "An estimate below the limit averages in observations from before or after the breach."


def annotation_texts(
    alert: AlertStep,
    where: str,
    kernels: str,
    choose: Callable[[str, str, str], str],
    *,
    slice: str = "",
    bounds: Mapping[str, str] = MappingProxyType({}),
    sites: Sites = NOWHERE,
    text: Callable[[str], str] = str,
    actions: str = "Actions",
) -> dict[str, str]:
    """Return the texts that the on-call person reads, of values of a cell or templates of them.

    `choose` makes one of three texts: while the verdict is FAIL, while only the alert holds or no evaluator lives, and
    while the incident of the pair is contained. `text` makes a contract's words fit into a template.
    """
    what = {
        "fail": f"{alert.clause_id} broke its limit on {where}",
        "no-data": f"no data came for {alert.clause_id} on {where}",
        "inconclusive": f"{alert.clause_id} could not be decided on {where}",
        "invalid-input": "sequences failed the input checks",
    }[alert.step.on]  # stays true while the alert only waits for its `clear_for`
    with_numbers = alert.status in {Status.FAIL, Status.INCONCLUSIVE}
    numbers = ", ".join(f"{name} {value}" for name, value in bounds.items())
    effect = consequence(alert.clause, alert.step.on, where)
    if alert.step.on == "no-data":  # no metric says whether its run has ended
        effect = f"Unless its run has ended, {effect[0].lower()}{effect[1:]}"
    description = (
        choose(effect, _NOT_REFUTED, kept_away(where)) if alert.step.on == "fail" else effect,
        f"{actions}: {', '.join(map(str, alert.step.do))}.",
        f"Now: {remedy_of(alert.contract, alert.step.on)}{_UNLESS_DONE * (alert.step.on == 'fail')}.",
        text(alert.promise),
        f"Measured: {numbers}." if with_numbers and numbers else "",
        _AVERAGED if alert.step.on == "fail" and numbers else "",
    )
    return {
        "summary": f"{alert.contract.name}: {what}{kernels}",
        "description": " ".join(filter(None, description)),
        "owner": text(alert.contract.metadata.owner),
        **sites.dashboard(overview_link(alert.contract.name, "$__all" if alert.clause is None else slice)),
        **sites.runbook(alert.name, text(alert.contract.metadata.runbook or "")),
    }


def unique_names(contracts: Iterable[Contract]) -> tuple[Contract, ...]:
    """The contracts, sorted by name; ValueError if two have the same, whose series would be one."""
    ordered = tuple(sorted(contracts, key=lambda contract: contract.name))
    for first, second in itertools.pairwise(ordered):
        if first.name == second.name:
            raise ValueError(f"two contracts are named {first.name!r}; give one of them another metadata.name")
    return ordered


def literal(text: str) -> str:
    """Text that comes out of a template of Prometheus or Grafana as it is, whatever it contains."""
    return text.replace("{{", "{{ `{{` }}").replace("${", "{{ `$` }}{")


RETIRED_AFTER: Final = "1d"
"""Time without any evaluation of a contract after which its states no longer alert."""
FRESH_SECONDS: Final = 60
"""Seconds for which what an evaluator said last is what is the case."""
AGE: Final = f"time() - max({selector('kc.evaluator.last_evaluation', None)})"
"""PromQL: seconds since the last evaluation; nothing where no evaluator has ever said that there was one."""


def living(contract: str | None = None) -> str:
    """PromQL: a series for each contract, or for one, that an evaluator has judged within the last minute."""
    matchers = None if contract is None else {"kc.contract": contract}
    return f"{selector('kc.evaluator.last_evaluation', matchers)} > time() - {FRESH_SECONDS}"


LIVING: Final = living()
_LABELS: Final = {
    "contract": "kc.contract",
    "kernel_train": "kc.kernel.train",
    "kernel_inference": "kc.kernel.inference",
    "outcome": "kc.outcome",
}
"""Labels of an alert, as in the evaluator's webhooks, and the attributes that they are taken from."""
_STAGE_QUERY: Final = selector("kc.promotion.stage", None)
_ROLL_BACK: Final = ("contract", "kernel_inference")
_PAIR_LABELS: Final = ("contract", "kernel_train", "kernel_inference")
_MISSING_LABELS: Final = (*_PAIR_LABELS, "outcome")
_NEWS_SECONDS: Final = 3600
"""Seconds for which a roll-back is news; measurements after it are said until a person acts on them."""


@dataclass(frozen=True, slots=True)
class StateAlert:
    """Words about a state of the evaluator: PromQL with a series for each, its labels, its panel, its texts."""

    name: str
    uid: str
    severity: str
    expression: str
    given: tuple[str, ...]
    panel: tuple[str, int]
    summary: str
    description: str
    runbook: str = ""
    after: float = 0.0
    contract: str = ""
    """The one that it is about, where the texts are not of any."""

    def labels(self, of: Callable[[str], str]) -> dict[str, str]:
        """Labels, where `of` is a template of the label that it is given."""
        own = {"contract": self.contract} if self.contract else {}
        return {"severity": self.severity, **own} | {name: of(label(_LABELS[name])) for name in self.given}

    @property
    def held(self) -> str:
        """PromQL: the state, neither over nor new while nobody judges its contract, for a day at most."""
        firing = f'ALERTS{{alertstate="firing", alertname="{self.name}", severity="{self.severity}"}}'
        without = ", ".join(("alertname", "alertstate", "severity", *self.given))
        contract = label("kc.contract")
        judged = f"last_over_time({selector('kc.evaluator.last_evaluation', None)}[{RETIRED_AFTER}])"
        held = f"max without ({without}) ({firing}) unless on ({contract}) ({LIVING}) and on ({contract}) {judged}"
        return f"({self.expression})\nor\n{held}"

    def texts(self, of: Callable[[str], str]) -> dict[str, str]:
        """Annotations."""
        values = {name: of(label(_LABELS[name])) for name in self.given}
        texts = {"summary": self.summary.format(**values), "description": self.description.format(**values)}
        return texts | ({"runbook": self.runbook} if self.runbook else {})


def _by(given: tuple[str, ...], expression: str, how: str = "max") -> str:
    """PromQL by the labels given: evaluators that run side by side count once."""
    return f"{how} by ({', '.join(label(_LABELS[name]) for name in given)}) ({expression})"


EVALUATOR_DOWN: Final = StateAlert(
    "KernelContractEvaluatorDown",
    "kc-evaluator-down",
    "critical",
    f"absent({LIVING})",
    (),
    (HEALTH_UID, EVALUATED_ID),
    "no evaluator of kernel contracts is running: nothing monitors any contract",
    f"No evaluator has judged within the last {FRESH_SECONDS} seconds, or Prometheus scrapes none. Alerts and "
    "dashboards show the past; a drift that begins now goes unseen.",
    "1. Run `curl http://HOST:4320/healthz`. If it fails, read the log and restart it: the evaluator restores its "
    "state.\n2. If it answers, check the scrape target in Prometheus; if the evaluator hangs, restart it.\n3. Until "
    "then firing alerts stay, new breaches go unseen, routes stay as they are, and recorders retry.",
    after=30.0,  # a restart takes less, and with a scrape every 15 s it fires within a minute
)


def evaluator_down(contract: str) -> StateAlert:
    """The alert that nobody judges a contract, while evaluators judge others; `EVALUATOR_DOWN` where none lives."""
    return replace(
        EVALUATOR_DOWN,
        uid=f"kc-down-{hashlib.sha256(contract.encode()).hexdigest()[:16]}",
        expression=f"absent({living(contract)}) and on () ({LIVING})",
        summary=f"no evaluator judges {contract}, while others are judged",
        description=f"No evaluator has judged {contract} within the last {FRESH_SECONDS} seconds: its evaluator is "
        "down, hangs, or serves it no more. Alerts and dashboards show the past; a drift that begins now goes unseen.",
        contract=contract,
    )


_ADVICE: Final = "`kc-otel promote {contract} {kernel_inference}` says why it was rolled back."
STATE_ALERTS: Final = (
    StateAlert(
        ROLLED_BACK_ALERT,
        "kc-rolled-back-warning",
        "warning",
        f"{_by(_ROLL_BACK, _STAGE_QUERY, 'min')} < 0 and "
        f"{_by(_ROLL_BACK, selector('kc.promotion.since', None))} > time() - {_NEWS_SECONDS}",
        _ROLL_BACK,
        (PROMOTION_UID, STAGE_ID),
        "{contract}: {kernel_inference} was rolled back",
        f"It failed in its promotion, or a person decided so: it should serve nobody. {_ADVICE}",
    ),
    StateAlert(
        ROLLED_BACK_ALERT,
        "kc-rolled-back-critical",
        "critical",
        f"{_by(_ROLL_BACK, _STAGE_QUERY, 'min')} == -2",
        _ROLL_BACK,
        (PROMOTION_UID, STAGE_ID),
        "{contract}: {kernel_inference} was measured after its rollback",
        "Its drift was measured later than the longer of heartbeat and window after the rollback: "
        f"{MEASURED_LATER}. Check that every serving process asks a router, and that no mirror sends it requests. "
        "Silence does not end this alert; `kc-otel promote CONTRACT KERNEL --rollback --why ...` does. "
        f"{_ADVICE}",
    ),
    StateAlert(
        "KernelContractUnproven",
        "kc-unproven",
        "warning",
        f"{_by(_PAIR_LABELS, selector('kc.incident', None), 'min')} == 0",
        _PAIR_LABELS,
        (OVERVIEW_UID, NOT_HOLDING_ID),
        "{contract}: a breach of {kernel_inference} against {kernel_train} went away without proof of recovery",
        "The kernel, or a recorder of it, fell silent beside others, and no verdict has refuted the breach or the "
        "invalid input: it may still serve. Silence does not end this alert; its recorder's return, `kc-otel promote "
        "{contract} {kernel_inference} --rollback --why ...` or, once it is known to serve nobody, `kc-otel alerts ack "
        "{contract} --close --why ...` does.",
    ),
    StateAlert(
        "KernelContractPointsMissing",
        "kc-points-missing",
        "warning",
        f"{_by(_MISSING_LABELS, selector('kc.evaluator.missing', None))} > 0",
        _MISSING_LABELS,
        (HEALTH_UID, MISSING_ID),
        "{contract}: points of {kernel_inference} against {kernel_train} arrive and are not judged ({outcome})",
        "Verdicts say nothing about what these senders measure, though others of the kernels may pass. `kc-otel "
        "status` names the senders and says what to do.",
    ),
)
