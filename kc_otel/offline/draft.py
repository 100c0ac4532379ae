"""A draft as a commented contract: YAML in which every limit says where it comes from and what breaks beyond it."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.load import load_text
from kc_otel.contract.measuring_paths import TRAINERS, MeasuringPath, why_not
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import rounded
from kc_otel.judge.sample_sizes import Needed, observations_to_pass, typical_size
from kc_otel.offline.draft_clauses import (
    BUDGET,
    CAP_IN_LIMITS,
    TAIL_OF_TV,
    Draft,
    DraftClause,
    NoiseFloor,
    clauses_of,
    cut,
    exact,
    floors,
)
from kc_otel.offline.gate.recorded_verdicts import by_contract
from kc_otel.recordings.recording import Recording

_LINE_CHARACTERS: Final = 112
_RAISE: Final = 1.25
_MOST_RAISES: Final = 11
"""Times that a margin is raised at most, more than tenfold together."""
_LEAST_TRUTH: Final = 0.05
"""In limits: a smaller value is decided no sooner."""
_LEAST_LIMIT: Final = 1e-6
"""A pair that is the same to the last bit keeps any limit; below this one rounding alone is a breach."""
_LAG_CLAUSE: Final = Clause(id="weights-lag", metric="weights_lag", limit=1)
_REWARD_DRIFT: Final = Clause(id=BUDGET, metric="reward_drift", limit=1)
_REWARD_PATHS: Final = frozenset({MeasuringPath.TRL, MeasuringPath.VERL})
"""Measuring paths on which sequences have rewards without further setup."""


@dataclass(frozen=True, slots=True)
class Written:
    """A contract as text, the observations that a PASS takes, and the baseline's floors and clauses that it decides.

    `older` tokens of the baseline, which older weights sampled, are in no floor.
    """

    text: str
    contract: Contract
    needed: tuple[Needed, ...]
    floors: tuple[NoiseFloor, ...] = ()
    measured: tuple[str, ...] = ()
    older: int = 0

    @property
    def empty(self) -> tuple[str, ...]:
        """Slices that the baseline has no sequence of: their limits are those of all traffic."""
        there = {floor.slice for floor in self.floors}
        return tuple(name for name in self.contract.slices if there and name not in there)


def write(draft: Draft, baseline: Recording | None = None, *, margin: float = 2.0, prompts: int = 400) -> Written:
    """The contract of a draft; without a recording, comments explain what would guarantee the budget token by token.

    With the `baseline` of an accepted pair, limits on tokens are `margin` times what it keeps, raised until a pair like
    it typically passes with `prompts`; a bound of the budget that it breaks is explained and not asked for. What older
    weights sampled is left out: its drift includes staleness, which no gate holds against the kernels.
    """
    if not margin >= 1.0:
        raise ValueError(f"margin: {margin!r} is below 1, so the limit would be below the pair's own drift; write 2")
    rewarded = draft.data in _REWARD_PATHS or (baseline is not None and baseline.rewards is not None)
    draft = replace(draft, rewards=rewarded and not why_not(_REWARD_DRIFT, draft.data))

    found: tuple[NoiseFloor, ...] = ()
    measured: tuple[str, ...] = ()
    older, name = 0, ""
    clauses = clauses_of(draft)
    if baseline is not None:
        name = Path(baseline.source).name
        every = _contract(draft, clauses, explained=True)
        fresh = by_contract(baseline, every).get(ALL)
        if fresh is None:
            raise ValueError(
                f"{baseline.source}: older weights sampled all of it, so that its drift includes staleness; record a "
                "baseline at lag 0"
            )
        older = baseline.train.size - fresh.train.size
        # A cap that follows from the budget would cut the baseline.
        found = tuple(floors(every, fresh))
        capped = clauses_of(draft, capped=True)
        clauses, measured = _measured(_contract(draft, capped, explained=True), capped, found, margin, fresh, prompts)
    contract = _contract(draft, clauses)
    needed = tuple(observations_to_pass(contract, clause, ALL) for clause in contract.clauses)
    if never := [cell.clause for cell in needed if cell.observations is None]:
        msg = f"{', '.join(never)}: no number of observations can PASS it, even of identical kernels; raise the budget"
        raise ValueError(msg)
    text = "\n".join(_lines(draft, clauses, needed, name))
    return Written(text, load_text(text, f"{draft.name}.yaml"), needed, found, measured, older)


def _contract(draft: Draft, clauses: Sequence[DraftClause], *, explained: bool = False) -> Contract:
    """The contract of these clauses, and if asked for of those that only explain."""
    asked = [replace(clause, explains=clause.explains and not explained) for clause in clauses]
    return load_text("\n".join(_lines(draft, asked)), f"{draft.name}.yaml")


def _measured(
    contract: Contract,
    clauses: Sequence[DraftClause],
    found: Sequence[NoiseFloor],
    margin: float,
    baseline: Recording,
    prompts: int,
) -> tuple[tuple[DraftClause, ...], tuple[str, ...]]:
    """Clauses with limits that the baseline keeps by a margin, and the ids of those that it decides.

    The margin is raised until a pair like the baseline typically passes with so many prompts.
    """
    by = {(floor.clause, floor.slice): floor for floor in found if math.isfinite(floor.interval.upper)}
    there = baseline.lengths.size if baseline.prompts is None else int(baseline.prompts.max()) + 1
    most = {Unit.TOKEN: prompts * int(baseline.lengths.sum()) // there}
    result, ids = [], []
    cap: float | None = None
    for draft in clauses:
        own = {slice: floor for (clause, slice), floor in by.items() if clause == draft.clause.id}
        floor = own.get(ALL)
        if draft.clause.id == TAIL_OF_TV:
            if cap is not None:
                tail = draft.changed(draft.derivation, statistic=f"fraction > {exact(cap)}")
                result.append(_passable(contract, tail, prompts))
        elif floor is None:
            result.append(draft)
        elif draft.clause.id == BUDGET:
            result.append(_broken_budget(draft, floor, baseline.source) if floor.breaks_limit else draft)
        else:
            for step in range(_MOST_RAISES + 1):
                made = _with_margin(draft, own, margin * _RAISE**step, baseline.source)
                truth = max(floor.interval.estimate / made.clause.limit_for(ALL), _LEAST_TRUTH)
                size = typical_size(contract, made.clause, ALL, truth)
                if size is None or size <= most.get(made.clause.quantity.per, prompts):  # type: ignore[union-attr]
                    break
            ids.append(made.clause.id)
            result.append(made)
            cap = made.clause.cap if draft.clause.cap is not None else cap
    return tuple(result), tuple(ids)


def _with_margin(draft: DraftClause, own: Mapping[str, NoiseFloor], margin: float, source: str) -> DraftClause:
    limits = {
        slice: max(min(cut(margin * of.interval.upper * 1.005), 0.999), _LEAST_LIMIT) for slice, of in own.items()
    }
    limit = limits.pop(ALL)
    slices = {slice: higher for slice, higher in limits.items() if higher > limit}
    cap = cut(CAP_IN_LIMITS * max(limit, *slices.values(), 0.0))
    return draft.changed(
        f"{margin:.3g} x the drift of {Path(source).name}: {_figure(own[ALL])}. The budget alone would give "
        f"{rounded(own[ALL].limit)}: this limit does not guarantee it.",
        limit=limit,
        slices=slices,
        cap=cap if draft.clause.cap is not None and cap < 1.0 else None,
        description="The kernels are further apart than the accepted pair, by more than the margin.",
    )


def _broken_budget(draft: DraftClause, floor: NoiseFloor, source: str) -> DraftClause:
    said = (
        f"{draft.derivation} The pair of {Path(source).name} breaks it: {_figure(floor)}. It covers the worst possible "
    )
    return replace(draft, derivation=said + "reward: record rewards to limit reward_drift itself.", explains=True)


def _passable(contract: Contract, draft: DraftClause, prompts: int) -> DraftClause:
    """The clause on what is above the cap, with a limit that so many prompts without any can PASS."""
    limit = first = draft.clause.limit_for(ALL)
    while limit < 1.0:
        needed = observations_to_pass(contract, draft.clause.model_copy(update={"limit": limit}), ALL).observations
        if needed is not None and needed <= prompts:
            break
        limit *= 1.1
    if limit == first:
        return draft
    said = "The share of prompts above the cap of token-tv, which that clause does not limit. The smallest share that "
    return draft.changed(f"{said}{prompts:,} prompts can confirm.", limit=cut(min(limit, 0.999)))


def _figure(floor: NoiseFloor) -> str:
    """A baseline's figure: its estimate, its upper bound, and what it rests on."""
    found = floor.interval
    return f"{rounded(found.estimate)}, at most {rounded(found.upper)}, from {found.samples:,} {floor.unit}s"


def _lines(
    draft: Draft, clauses: Sequence[DraftClause], needed: Sequence[Needed] = (), source: str = ""
) -> Iterator[str]:
    yield from _head(draft, source)
    yield "statistical:  # from the log-probabilities of sampled tokens"
    for clause in clauses:
        yield from _clause(clause, needed)
    yield from _foot(draft, [clause.clause.id for clause in clauses if not clause.explains])


def _head(draft: Draft, source: str) -> Iterator[str]:
    low, high = draft.reward_range
    yield from _comment(
        f"{draft.name}: how far {draft.inference['engine']} may be from {draft.train['engine']} so that the mean "
        f"reward, in [{low:g}, {high:g}], moves by at most {draft.reward_budget:g} over answers of up to "
        f"{draft.horizon} tokens."
    )
    yield "#"
    if source:
        yield from _comment(
            f"Limits on tokens are the drift of the accepted pair in {source}, times a margin. "
            "`kc-otel gate plan` says how much traffic decides them."
        )
        yield "#"
    explained = (
        "Comments below it name token limits that would guarantee it. They are no clauses, because real kernels "
        "exceed them while the measured budget holds."
    )
    yield from _comment(
        "P is train, Q inference, w = P/Q of a sampled token, W of a sequence. "
        f"{'' if source else 'Clause reward is the budget. ' + explained}"
    )
    yield "apiVersion: kernel-contract/v1"
    yield "kind: KernelContract"
    yield "metadata:"
    yield f"  name: {_text(draft.name)}"
    yield "  version: 1"
    yield f"  owner: {_text(draft.owner)}"
    yield "kernels:"
    for role, fields in (("train", draft.train), ("inference", draft.inference)):
        yield f"  {role}: {_inline(fields)}"
    yield from _comment(
        "Measurements that contradict these prevent a PASS: in longer answers the same drift costs more."
    )
    yield "assumptions:"
    yield f"  reward_range: [{exact(low)}, {exact(high)}]"
    yield f"  horizon: {draft.horizon}"
    if draft.clip is not None:
        yield f"  clip: {exact(draft.clip)}  # PPO's epsilon"
    if draft.slices:
        yield "slices:"
        for name, where in draft.slices.items():
            yield f"  {_text(name)}: {{where: {_inline(where)}}}"


def _foot(draft: Draft, asked: Sequence[str]) -> Iterator[str]:
    lag = not why_not(_LAG_CLAUSE, draft.data)
    if lag:
        yield "runtime:"
        yield from _comment(
            "With older weights, drift includes the policy's own change. Asynchronous recipes run at 1; write 0 if "
            "rollouts wait for the sync.",
            "  ",
        )
        yield f"  - id: {_LAG_CLAUSE.id}"
        yield f"    metric: {_LAG_CLAUSE.metric}"
        yield "    limit: 1"
        yield "    description: Rollouts come from older weights than the recipe allows; look at the weight sync first."
    yield from _comment(
        "A PASS needs the whole confidence interval below the limit. A kernel pair that reports nothing for a "
        "heartbeat is NO_DATA, which is not a PASS."
    )
    yield "observability:"
    yield "  window: 5m"
    yield "  long_window: 1h"
    yield f"  confidence: {exact(draft.confidence)}"
    yield "  min_samples: 2000"
    yield "  min_sequences: 100"
    yield "  sampling: 0.25  # sample-more raises it to 1"
    yield "  heartbeat: 60s"
    yield "escalation:"
    yield from _comment("Any clause: notify, and measure more.", "  ")
    yield "  - {on: fail, severity: warning, do: [notify, sample-more]}"
    critical, what = ([BUDGET], "The budget") if BUDGET in asked else (asked, "The kernels' distance")
    what = f"{what} or the weights" if lag else what
    # Only a service has a router; a trainer can leave rollouts out, send its weights again and stop.
    serves = draft.data not in TRAINERS
    done = "route to the training kernel" if serves else "leave its rollouts out of the loss"
    yield from _comment(f"{what}: {done}, and page.", "  ")
    clauses = ", ".join([*critical, *([_LAG_CLAUSE.id] if lag else [])])
    first = "{route: train-kernel}" if serves else "quarantine-rollouts, resync-weights"
    yield _step("2m", f"[{first}, {{webhook: pager}}]", clauses)
    later = "notify, hold-promotion" if serves else "halt, hold-promotion"
    ends = "notify again, and hold promotions" if serves else "stop training"
    yield from _comment(f"After half an hour: {ends}.", "  ")
    yield _step("30m", f"[{later}]", clauses)
    yield from _comment("Neither silence nor unusable input is a PASS.", "  ")
    yield "  - {on: no-data, for: 3m, severity: warning, do: [notify, hold-promotion]}"
    yield "  - {on: invalid-input, severity: warning, do: [notify]}"
    yield ""


def _step(after: str, actions: str, clauses: str) -> str:
    fields = {"for": after, "clear_for": "10m", "severity": "critical", "do": actions, "clauses": f"[{clauses}]"}
    return "\n".join(["  - on: fail", *(f"    {name}: {value}" for name, value in fields.items())])


def _clause(draft: DraftClause, needed: Sequence[Needed]) -> Iterator[str]:
    clause = draft.clause
    explained = f"Not a clause, {clause.id}: " if draft.explains else ""
    yield from _comment(explained + draft.derivation, "  ")
    for cell in needed:
        if cell.clause == clause.id and cell.observations is not None:
            count = f"{cell.observations:,} {cell.unit}s"
            yield from _comment(f"A PASS takes at least {count}, even from identical kernels.", "  ")
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


def _comment(text: str, indent: str = "") -> Iterable[str]:
    return textwrap.wrap(
        text, _LINE_CHARACTERS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False
    )


def _inline(fields: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_text(key)}: {_text(value)}" for key, value in fields.items()) + "}"


_YAML_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def _text(value: str) -> str:
    """Text as YAML reads it back, quoted where it would be anything else; plain numbers stay numbers."""
    is_number = re.fullmatch(r"\d{1,15}(\.\d{1,15})?", value)
    is_word = re.fullmatch(r"[A-Za-z](?:[A-Za-z0-9_. -]*[A-Za-z0-9_.-])?", value) and value.lower() not in _YAML_WORDS
    return value if is_number or is_word else json.dumps(value, ensure_ascii=False)
