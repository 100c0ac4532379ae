"""A contract from a reward budget and a recording of an accepted pair, as YAML whose comments say how limits follow.

The budget itself is one clause. A baseline, a recording of an accepted pair, adds clauses on tokens, with limits of
its own: limits that would guarantee the budget token by token are ones that real kernels break while they keep it.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.load import load_text
from kc_otel.contract.measuring_paths import OBEYED, MeasuringPath, judgeable, why_not
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import rounded, rounded_down
from kc_otel.judge.sample_sizes import Needed, observations_to_pass, typical_size
from kc_otel.judge.statistics import clause_interval
from kc_otel.offline.gate.recorded_verdicts import RecordingObservations, by_contract
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Interval, tv_for_reward_budget

BUDGET: Final = "reward"
"""The clause that is the budget itself: no baseline changes it."""
_TV_CLAUSE_ID, _TV_TAIL_CLAUSE_ID = "token-tv", "token-tv-tail"
_CAP_IN_LIMITS: Final = 5.0
"""Cap of a capped mean, in limits: it needs a fiftieth of the prompts, and kernels within the limit seldom reach it."""
_ON_TOKENS: Final = (
    Clause(id="token-kl", metric="k3", unit="token", limit=0.5),
    Clause(id=_TV_CLAUSE_ID, metric="tv_token", unit="token", limit=0.5),
    Clause(id=_TV_TAIL_CLAUSE_ID, metric="tv_token", statistic="fraction > 0.5", unit="prompt", limit=0.01),
    Clause(id="tail", metric="tv_token", statistic="fraction > 0.5", unit="token", limit=0.5),
)
"""Clauses that a baseline gives their limits. Above a (1-w)+ of 0.5 a token is another one more often than not."""
_LINE_CHARACTERS: Final = 112
_MARGIN_GROWTH: Final = 1.25
_MAX_MARGIN_RAISES: Final = 11
"""Times that a margin is raised at most, more than tenfold together."""
_MIN_ESTIMATE_IN_LIMITS: Final = 0.05
"""In limits: a smaller value is decided no sooner."""
_CHANGED: Final = (40, 1.25, 5.0)
"""Prompts of a baseline, ratio of its halves, and standard errors between them, from which its drift has changed."""
_MIN_LIMIT: Final = 1e-6
"""Rounding alone exceeds a smaller limit, which a long baseline of nearly equal sides would give."""
_LAG_CLAUSE: Final = Clause(id="weights-lag", metric="weights_lag", limit=1)
_REWARD_DRIFT: Final = Clause(id=BUDGET, metric="reward_drift", limit=1)
_REWARD_PATHS: Final = frozenset({MeasuringPath.TRL, MeasuringPath.VERL})
"""Measuring paths on which sequences have rewards without further setup."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Inputs of a new contract: both kernels' fields, the largest acceptable drift of the mean reward, its range."""

    name: str
    owner: str
    train: Mapping[str, str]
    inference: Mapping[str, str]
    reward_budget: float
    reward_range: tuple[float, float] = (0.0, 1.0)
    horizon: int = 4096
    clip: float | None = None
    slices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    data: MeasuringPath = MeasuringPath.LOOP


@dataclass(frozen=True, slots=True)
class DraftClause:
    """A clause, what breaks beyond its limit, and how that follows; one that only `explains` is not asked for."""

    clause: Clause
    derivation: str
    explains: bool = False


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """A clause's statistic on a recording, with its bounds: the upper one is the floor."""

    clause: str
    slice: str
    interval: Interval
    unit: str


def floors(contract: Contract, recording: Recording) -> Iterator[NoiseFloor]:
    """The floor of each clause that log-probabilities decide, on every slice of which the recording has sequences."""
    alpha = (1.0 - contract.observability.confidence) / 2.0
    members = [contract.slices_of(attributes) for attributes in recording.attributes]
    for slice in (ALL, *contract.slices):
        inside = np.array([slice in names for names in members], dtype=np.bool_)
        if not inside.any():
            continue
        observed = RecordingObservations(recording.only(inside))
        for clause in contract.clauses:
            sample = None if clause.quantity is None else observed.of(clause.quantity.key)
            if clause.quantity is None or sample is None:
                continue
            found = clause_interval(clause, contract.assumptions, sample, alpha_lower=alpha, alpha_upper=alpha)
            yield NoiseFloor(clause.id, slice, found, str(clause.quantity.per))


@dataclass(frozen=True, slots=True)
class Written:
    """A contract, the observations that a PASS takes, the baseline's floors, clauses it decides, tokens left out."""

    text: str
    contract: Contract
    needed: tuple[Needed, ...]
    floors: tuple[NoiseFloor, ...] = ()
    measured: tuple[str, ...] = ()
    older: int = 0
    changed: str = ""

    @property
    def empty(self) -> tuple[str, ...]:
        """Slices that the baseline has no sequence of: their limits are those of all traffic."""
        there = {floor.slice for floor in self.floors}
        return tuple(name for name in self.contract.slices if there and name not in there)


def write(draft: Draft, baseline: Recording | None = None, *, margin: float = 2.0, prompts: int = 400) -> Written:
    """The contract of a draft; without a recording, the budget is its only clause on drift.

    With the `baseline` of an accepted pair, limits on tokens are `margin` times what it keeps, raised until a pair like
    it typically passes with `prompts`; a bound of the budget that it breaks is explained and not asked for. What older
    weights sampled is left out: its drift includes staleness, which no gate holds against the kernels.
    """
    if not margin >= 1.0:
        raise ValueError(f"margin: {margin!r} is below 1, so the limit would be below the pair's own drift; write 2")
    rewarded = draft.data in _REWARD_PATHS or (baseline is not None and baseline.rewards is not None)
    budget = _budget(draft, measured=rewarded and not why_not(_REWARD_DRIFT, draft.data))
    clauses: list[DraftClause] = [budget]
    found: tuple[NoiseFloor, ...] = ()
    older, name, changed = 0, "", ""
    if baseline is not None:
        name = Path(baseline.source).name
        if baseline.identical:
            raise ValueError(
                f"{baseline.source}: both sides have the same number at every token, so that one is a copy of the "
                "other, and every real pair would exceed the limits; record both kernels, or leave --baseline out"
            )
        low, high = draft.reward_range
        if (there := baseline.rewards) is not None and not low <= np.nanmin(there) <= np.nanmax(there) <= high:
            said = f"rewards lie between {np.nanmin(there):g} and {np.nanmax(there):g}, outside of {low:g} to {high:g}"
            raise ValueError(f"{baseline.source}: {said}; give all possible rewards: --reward-range=LOW,HIGH")
        contract = _contract(draft, [budget, *(DraftClause(clause, "") for clause in _ON_TOKENS)])
        fresh = by_contract(baseline, contract).get(ALL)
        if fresh is None:
            raise ValueError(
                f"{baseline.source}: older weights sampled all of it, so that its drift includes staleness; record a "
                "baseline at lag 0"
            )
        older = baseline.train.size - fresh.train.size
        found, changed = tuple(floors(contract, fresh)), _changed(fresh)
        broken = next((floor for floor in found if (floor.clause, floor.slice) == (BUDGET, ALL)), None)
        if broken is not None and broken.interval.lower > draft.reward_budget:
            said = f"{budget.derivation} The pair of {name} breaks it: {_figure(broken)}. It covers the worst possible"
            said += " reward: record rewards to limit reward_drift itself."
            clauses = [replace(budget, derivation=said, explains=True)]
        clauses += _measured(contract, found, margin, fresh, prompts, name)
    contract = _contract(draft, clauses)
    needed = tuple(observations_to_pass(contract, clause, ALL) for clause in contract.clauses)
    if never := [cell.clause for cell in needed if cell.observations is None]:
        msg = f"{', '.join(never)}: no number of observations can PASS it, even of identical kernels; raise the budget"
        raise ValueError(msg)
    text = _text_of(draft, clauses, needed, name)
    measured = tuple(made.clause.id for made in clauses if made.clause.id not in {BUDGET, _TV_TAIL_CLAUSE_ID})
    return Written(text, load_text(text, f"{draft.name}.yaml"), needed, found, measured, older, changed)


def _changed(baseline: Recording) -> str:
    """Say that the first half of the prompts, in their order, drifts otherwise than the second; else empty."""
    values = RecordingObservations(baseline).of_sequences("tv_token")
    assert values is not None
    of = np.arange(values.size) if baseline.prompts is None else baseline.prompts
    if of.max() + 1 < _CHANGED[0]:
        return ""
    halves = np.array_split(np.bincount(of, values) / np.bincount(of), 2)
    (first, second), errors = (half.mean() for half in halves), [half.var() / half.size for half in halves]
    apart = max(first, second) > _CHANGED[1] * min(first, second)
    if not apart or abs(second - first) < _CHANGED[2] * math.sqrt(sum(errors)):
        return ""
    return (
        f"the baseline's drift changes: mean (1-w)+ of {rounded(first)} in the first half of its prompts, "
        f"{rounded(second)} in the second; if a kernel changed in between, record one pair: the limits cover both"
    )


def _budget(draft: Draft, *, measured: bool) -> DraftClause:
    """The budget itself: measured where rewards are known, else its bound."""
    budget, (low, high) = draft.reward_budget, draft.reward_range
    tv = tv_for_reward_budget(budget, draft.reward_range)
    if not 0.0 < tv < 1.0:
        raise ValueError(
            f"reward budget: {budget!r} is not above 0 and below the width of the reward range, {high - low:g}; write "
            f"the largest acceptable loss, such as {0.02 * (high - low):g}"
        )
    breaks = "The mean reward under the two kernels may differ by more than the budget."
    if measured:
        derivation = (
            "The budget itself, measured from the rewards of the sampled sequences: |E_P r - E_Q r| = |E_Q[(W-1) r]|. "
            "It needs no horizon and no worst case."
        )
        return DraftClause(Clause(id=BUDGET, metric="reward_drift", limit=budget, description=breaks), derivation)
    width = f"{high:g} - {low:g}" if low >= 0 else f"{high:g} - ({low:g})"
    derivation = (
        f"The budget itself: |E_P r - E_Q r| <= (r_max - r_min) TV_seq, so TV_seq <= {budget:g} / ({width}) = "
        f"{rounded(tv)}. Measured on whole sequences, TV_seq = E_Q[(1-W)+]: this needs no horizon and no worst case."
    )
    return DraftClause(Clause(id=BUDGET, metric="reward_drift_bound", limit=budget, description=breaks), derivation)


def _contract(draft: Draft, clauses: Sequence[DraftClause]) -> Contract:
    return load_text(_text_of(draft, clauses), f"{draft.name}.yaml")


def _measured(
    contract: Contract, found: Sequence[NoiseFloor], margin: float, baseline: Recording, prompts: int, source: str
) -> Iterator[DraftClause]:
    """Clauses on tokens whose margin is raised until a pair like the baseline typically passes with so many prompts."""
    there = baseline.lengths.size if baseline.prompts is None else int(baseline.prompts.max()) + 1
    most = {Unit.TOKEN: prompts * int(baseline.lengths.sum()) // there}
    cap: float | None = None
    for clause in _ON_TOKENS:
        if clause.id == _TV_TAIL_CLAUSE_ID:
            if cap is not None:
                yield _tail(contract, clause, cap, prompts)
            continue
        own = {of.slice: of for of in found if of.clause == clause.id and math.isfinite(of.interval.upper)}
        if ALL not in own:
            continue
        for step in range(_MAX_MARGIN_RAISES + 1):
            made = _with_margin(clause, own, margin * _MARGIN_GROWTH**step, source)
            truth = max(own[ALL].interval.estimate / made.clause.limit_for(ALL), _MIN_ESTIMATE_IN_LIMITS)
            size = typical_size(contract, made.clause, ALL, truth)
            if size is None or size <= most.get(Unit.PROMPT if clause.id == _TV_CLAUSE_ID else Unit.TOKEN, prompts):
                break
        cap = made.clause.cap if clause.id == _TV_CLAUSE_ID else cap
        yield made


def _with_margin(clause: Clause, own: Mapping[str, NoiseFloor], margin: float, source: str) -> DraftClause:
    above = {slice: cut(margin * of.interval.upper * 1.005) for slice, of in own.items()}
    limits = {slice: max(min(limit, 0.999), _MIN_LIMIT) for slice, limit in above.items()}
    limit = limits.pop(ALL)
    slices = {slice: higher for slice, higher in limits.items() if higher > limit}
    description = "The kernels are further apart than the accepted pair, by more than the margin."
    changed: dict[str, Any] = {"limit": limit, "slices": slices, "description": description}
    derivation = f"{margin:.3g} x the upper bound on the drift of {source}: {_figure(own[ALL])}."
    cap = cut(_CAP_IN_LIMITS * max(limit, *slices.values(), 0.0))
    if clause.id == _TV_CLAUSE_ID:
        changed |= {"unit": None, "cap": cap if cap < 1.0 else None}
    return DraftClause(Clause(**clause.model_dump(exclude_unset=True) | changed), derivation)


def _tail(contract: Contract, clause: Clause, cap: float, prompts: int) -> DraftClause:
    """The clause on what is above the cap, with a limit that so many prompts without any can PASS."""
    said = "The share of prompts above the cap of token-tv, which that clause does not limit."
    fields = clause.model_dump(exclude_unset=True) | {"statistic": f"fraction > {exact(cap)}"}
    fields["description"] = "More prompts than that drift by more than five limits; see which."
    limit, derivation = clause.limit_for(ALL), f"{said} {100 * clause.limit_for(ALL):g} % is a choice."
    while limit < 1.0:
        needed = observations_to_pass(contract, Clause(**fields | {"limit": limit}), ALL).observations
        if needed is not None and needed <= prompts:
            break
        limit *= 1.1
        derivation = f"{said} The smallest share that {prompts:,} prompts can confirm."
    return DraftClause(Clause(**fields | {"limit": cut(min(limit, 0.999))}), derivation)


def cut(value: float) -> float:
    """A limit cut to three significant digits, so that it is still enough."""
    return float(rounded_down(value).replace(",", ""))


def exact(value: float) -> str:
    """A number as YAML reads back the same one, without an exponent."""
    if not math.isfinite(value):
        raise ValueError(f"value: {value!r} cannot be written as a limit; give a finite number")
    text = format(Decimal(repr(float(value))), "f")
    return text.removesuffix(".0")


def _figure(floor: NoiseFloor) -> str:
    """A baseline's figure: its estimate, its upper bound, and what it rests on."""
    found = floor.interval
    return f"{rounded(found.estimate)}, at most {rounded(found.upper)}, from {found.samples:,} {floor.unit}s"


_CONTRACT_TEMPLATE: Final = """\
{purpose}
#{baseline}
{symbols}
apiVersion: kernel-contract/v1
kind: KernelContract
metadata:
  name: {name}
  version: 1
  owner: {owner}
kernels:
  train: {train}
  inference: {inference}
# Measurements that contradict these prevent a PASS: in longer answers the same drift costs more.
assumptions:
  reward_range: [{low}, {high}]
  horizon: {horizon}
{clip}{slices}statistical:  # from the log-probabilities of sampled tokens
{clauses}
{runtime}# A PASS needs the whole confidence interval below the limit. A kernel pair that reports nothing for a
# heartbeat is NO_DATA, which is not a PASS.
observability:
  window: 5m
  long_window: 1h
  confidence: 0.99
  min_samples: 2000
  min_sequences: 100
  sampling: 0.25{sampling}
  heartbeat: 60s
escalation:
  # Any clause: notify{closer}.
  - {{on: fail, severity: warning, do: [notify{more}]}}
  # {what}: {done}page.
  - {{on: fail, for: 2m, clear_for: 10m, severity: critical,
     do: [{first}{{webhook: pager}}],
     clauses: {critical}}}
  # After half an hour: {ends}.
  - {{on: fail, for: 30m, clear_for: 10m, severity: critical,
     do: [{later}, hold-promotion],
     clauses: {critical}}}
  # Neither silence nor unusable input is a PASS.
  - {{on: no-data, for: 3m, severity: warning, do: [notify, hold-promotion]}}
  - {{on: invalid-input, severity: warning, do: [notify]}}
"""
_RUNTIME_SECTION: Final = f"""\
runtime:
  # With older weights, drift includes the policy's own change. Asynchronous recipes run at 1; write 0 if rollouts wait
  # for the sync.
  - id: {_LAG_CLAUSE.id}
    metric: {_LAG_CLAUSE.metric}
    limit: 1
    description: Rollouts come from older weights than the recipe allows; look at the weight sync first.
"""
_DONE: Final = {
    "route": "route to the training kernel, and ",
    "quarantine-rollouts": "leave its rollouts out of the loss, and ",
    "resync-weights": "send the weights again, and ",
    "halt": "stop training",
    "notify": "notify again, and hold promotions",
}
"""Comments on the actions of the critical steps."""


def _actions(draft: Draft, clauses: Sequence[DraftClause]) -> dict[str, str]:
    """Return the steps of the policy, and their comments: actions that the measuring path can carry out."""
    able = OBEYED.get(draft.data, ("route",) if draft.data is MeasuringPath.VLLM else ("sample-more", "route"))
    asked = [clause.clause for clause in clauses if not clause.explains]
    acts = [name for name in able if name != "quarantine-rollouts" or any(map(judgeable, asked))]
    more, later = "sample-more" in acts, "halt" if "halt" in acts else "notify"
    first = [name for name in acts if name not in {"sample-more", "halt"}]
    return {
        "sampling": "  # sample-more raises it to 1" * more,
        "closer": ", and measure more" * more,
        "more": ", sample-more" * more,
        "done": _DONE[first[0]] if first else "",
        "first": "".join("{route: train-kernel}, " if name == "route" else f"{name}, " for name in first),
        "ends": _DONE[later],
        "later": later,
    }


def _text_of(draft: Draft, clauses: Sequence[DraftClause], needed: Sequence[Needed] = (), source: str = "") -> str:
    low, high = draft.reward_range
    lag = not why_not(_LAG_CLAUSE, draft.data)
    asked = [clause.clause.id for clause in clauses if not clause.explains]
    critical, what = ([BUDGET], "The budget") if BUDGET in asked else (asked, "The kernels' distance")
    limits = (
        f"Limits on tokens are upper bounds on the drift of the accepted pair in {source}, times a margin. `kc-otel "
        "gate plan` says how much traffic decides them."
    )
    slices = (f"  {_text(name)}: {{where: {_inline(where)}}}\n" for name, where in draft.slices.items())
    return _CONTRACT_TEMPLATE.format(
        purpose=_comment(
            f"{draft.name}: how far {draft.inference['engine']} may be from {draft.train['engine']} so that the mean "
            f"reward, in [{low:g}, {high:g}], moves by at most {draft.reward_budget:g} over answers of up to "
            f"{draft.horizon} tokens."
        ),
        baseline=f"\n{_comment(limits)}\n#" if source else "",
        symbols=_comment(
            "P is train, Q inference, w = P/Q of a sampled token, W of a sequence."
            + " Clause reward is the budget." * (not source)
        ),
        name=_text(draft.name),
        owner=_text(draft.owner),
        train=_inline(draft.train),
        inference=_inline(draft.inference),
        low=exact(low),
        high=exact(high),
        horizon=draft.horizon,
        clip="" if draft.clip is None else f"  clip: {exact(draft.clip)}  # PPO's epsilon\n",
        slices="slices:\n" + "".join(slices) if draft.slices else "",
        clauses="\n".join(line for clause in clauses for line in _clause(clause, needed)),
        runtime=_RUNTIME_SECTION if lag else "",
        what=f"{what} or the weights" if lag else what,
        critical=f"[{', '.join([*critical, *([_LAG_CLAUSE.id] if lag else [])])}]",
        **_actions(draft, clauses),
    )


def _clause(draft: DraftClause, needed: Sequence[Needed]) -> Iterator[str]:
    clause = draft.clause
    explained = f"Not a clause, {clause.id}: " if draft.explains else ""
    yield _comment(explained + draft.derivation, "  ")
    for cell in needed:
        if cell.clause == clause.id and cell.observations is not None:
            count = f"{max(cell.observations, cell.minimum):,} {cell.unit}s"
            yield _comment(f"A PASS takes at least {count}, even from identical kernels.", "  ")
    if draft.explains:
        return
    yield f"  - id: {clause.id}"
    fields = {
        "metric": clause.metric,
        "statistic": clause.statistic,
        "unit": clause.unit,
        "cap": clause.cap and exact(clause.cap),
        "limit": exact(clause.limit_for(ALL)),
        "slices": clause.slices and _inline({name: exact(clause.limit_for(name)) for name in clause.slices}),
        "description": _text(clause.description),
    }
    yield from (f"    {name}: {value}" for name, value in fields.items() if value)


def _comment(text: str, indent: str = "") -> str:
    mark = f"{indent}# "
    return textwrap.fill(text, _LINE_CHARACTERS, initial_indent=mark, subsequent_indent=mark, break_long_words=False)


def _inline(fields: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_text(key)}: {_text(value)}" for key, value in fields.items()) + "}"


_YAML_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def _text(value: str) -> str:
    """Text as YAML reads it back, quoted where it would be anything else; plain numbers stay numbers."""
    is_number = re.fullmatch(r"\d{1,15}(\.\d{1,15})?", value)
    is_word = re.fullmatch(r"[A-Za-z](?:[A-Za-z0-9_. -]*[A-Za-z0-9_.-])?", value) and value.lower() not in _YAML_WORDS
    return value if is_number or is_word else json.dumps(value, ensure_ascii=False)
