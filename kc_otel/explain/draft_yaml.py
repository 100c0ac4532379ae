"""A draft as a commented contract: YAML in which every limit says where it comes from and what breaks beyond it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.load import load_text
from kc_otel.contract.measuring_paths import why_not
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import rounded
from kc_otel.explain.draft import CAP_IN_LIMITS, Draft, DraftClause, clauses_of, cut, exact
from kc_otel.explain.noise_floor import NoiseFloor, floors
from kc_otel.judge.sample_sizes import Needed, observations_to_pass
from kc_otel.recordings.recording import Recording

__all__ = ["BUDGET", "Written", "floor_sentence", "write"]

_WIDTH: Final = 112
BUDGET: Final = "reward"
"""The clause that is the budget itself: no noise floor raises it."""
_LAG: Final = Clause(id="weights-lag", metric="weights_lag", limit=1)


@dataclass(frozen=True, slots=True)
class Written:
    """A contract as text, and what is to be said of it.

    Attributes:
        text: YAML.
        contract: The contract that it reads as.
        needed: Observations that each clause needs before it can PASS, on all traffic.
        floors: What the limits have to stand above, as they were derived; empty without a recording.
        raised: Ids of clauses whose limits were raised above what the budget gives.
    """

    text: str
    contract: Contract
    needed: tuple[Needed, ...]
    floors: tuple[NoiseFloor, ...] = ()
    raised: tuple[str, ...] = ()


def write(
    draft: Draft, recording: Recording | None = None, *, raise_to_floor: bool = False, margin: float = 1.2
) -> Written:
    """The contract of a draft.

    Args:
        draft: What it is made from.
        recording: Both kernels at their best, such as the training kernel against itself: its statistics are the floor.
        raise_to_floor: Whether limits that this recording breaks are raised to `margin` times the floor. The budget's
            own clause never is.
        margin: Factor above the floor, at least 1.

    Raises:
        ValueError: If the draft's numbers make no contract, or the margin is below 1.
        ContractError: If its names, kernels or slices make none.
    """
    if not margin >= 1.0:
        msg = f"margin: {margin!r} is below 1, so the limit would be below the floor; write 1.2"
        raise ValueError(msg)
    clauses = clauses_of(draft)
    contract = load_text("\n".join(_lines(draft, clauses)), f"{draft.name}.yaml")
    found = floors(contract, recording) if recording is not None else ()
    raised: tuple[str, ...] = ()
    if raise_to_floor:
        clauses, raised = _raised(clauses, found, margin)
        contract = load_text("\n".join(_lines(draft, clauses)), f"{draft.name}.yaml")
    needed = tuple(observations_to_pass(contract, clause, ALL) for clause in contract.clauses)
    source = recording.source if recording is not None else ""
    text = "\n".join(_lines(draft, clauses, needed, found, source))
    return Written(text, load_text(text, f"{draft.name}.yaml"), needed, found, raised)


def _raised(
    clauses: Sequence[DraftClause], found: Sequence[NoiseFloor], margin: float
) -> tuple[tuple[DraftClause, ...], tuple[str, ...]]:
    """Clauses with the limits that the floor breaks raised, and their ids."""
    result, ids = [], []
    for clause in clauses:
        broken = {f.slice: f for f in found if f.clause == clause.id and f.limit_side == "below"}
        if not broken or clause.id == BUDGET:
            result.append(clause)
            continue
        ids.append(clause.id)
        limit = _above(broken[ALL], margin) if ALL in broken else clause.limit
        slices = {name: _above(f, margin) for name, f in broken.items() if name != ALL and _above(f, margin) > limit}
        result.append(
            replace(
                clause,
                limit=limit,
                slices=slices,
                cap=None if clause.cap is None else CAP_IN_LIMITS * max(limit, *slices.values(), 0.0),
                derivation=f"Raised to {margin:g} x the noise floor, so this limit no longer guarantees the budget. "
                f"The budget gave: {clause.derivation}",
            )
        )
    return tuple(result), tuple(ids)


def _above(floor: NoiseFloor, margin: float) -> float:
    """A limit of three digits that is `margin` times the floor or a little more, within what a share can be."""
    value = cut(margin * floor.upper * 1.005)
    return min(value, 0.999)


def _lines(
    draft: Draft,
    clauses: Sequence[DraftClause],
    needed: Sequence[Needed] = (),
    found: Sequence[NoiseFloor] = (),
    source: str = "",
) -> Iterator[str]:
    yield from _head(draft, source if found else "")
    yield "statistical:  # from the log-probabilities of sampled tokens"
    for clause in clauses:
        yield from _clause(clause, needed, found)
    yield from _foot(draft)


def _head(draft: Draft, source: str) -> Iterator[str]:
    low, high = draft.reward_range
    yield from _comment(
        f"{draft.name}: how far {draft.inference['engine']} may be from {draft.train['engine']} so that the mean "
        f"reward, in [{low:g}, {high:g}], moves by at most {draft.reward_budget:g} over answers of up to "
        f"{draft.horizon} tokens."
    )
    yield "#"
    sequences = " (token-tv is capped, and about sequences)" if draft.capped else ""
    yield from _comment(
        "P is train, Q inference, w = P/Q of a sampled token, W of a sequence. The limits on tokens are early "
        "warnings: token-tv and token-kl would each guarantee the budget for the worst kernels that they allow, so "
        "real kernels often break them while the measured budget, clause reward, holds. They are about the tokens of "
        f"a window (unit: token), because limits as small as theirs take more sequences than windows hold{sequences}; "
        "reward is about what a slice will show. `kc-otel explain` draws the chain."
    )
    if source:
        yield "#"
        yield from _comment(
            f"The noise floor is measured on {source}: statistics of a pair that is as good as it gets. "
            "A limit below it fails for ever."
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
    yield from _comment("Measured, not trusted: a longer answer or a wider reward makes the same drift cost more.")
    yield "assumptions:"
    yield f"  reward_range: [{exact(low)}, {exact(high)}]"
    yield f"  horizon: {draft.horizon}"
    if draft.clip is not None:
        yield f"  clip: {exact(draft.clip)}  # PPO's epsilon"
    if draft.slices:
        yield "slices:"
        for name, where in draft.slices.items():
            yield f"  {_text(name)}: {{where: {_inline(where)}}}"


def _foot(draft: Draft) -> Iterator[str]:
    lag = not why_not(_LAG, draft.data)
    if lag:
        yield "runtime:"
        yield from _comment(
            "With older weights every number above measures the policy's own change. 1 is what asynchronous recipes "
            "run at; write 0 where rollouts wait for the sync.",
            "  ",
        )
        yield f"  - id: {_LAG.id}"
        yield f"    metric: {_LAG.metric}"
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
    yield "  sampling: 0.25  # sample-more, below, measures all of it"
    yield "  heartbeat: 60s"
    yield "escalation:"
    yield from _comment("Any clause: somebody looks, and more is measured, which is what decides early warnings.", "  ")
    yield "  - {on: fail, severity: warning, do: [notify, sample-more]}"
    what = "The budget or the weights" if lag else "The budget"
    yield from _comment(f"{what}: traffic goes back to the training kernel, and somebody is woken.", "  ")
    clauses = f"{BUDGET}, {_LAG.id}" if lag else BUDGET
    yield from _step("2m", "[{route: train-kernel}, {webhook: pager}]", clauses)
    yield from _comment("Still broken after half an hour: no more gradients from these rollouts.", "  ")
    yield from _step("30m", "[quarantine-rollouts, hold-promotion]", clauses)
    yield from _comment("Silence and unusable input are never a PASS.", "  ")
    yield "  - {on: no-data, for: 3m, severity: warning, do: [notify, hold-promotion]}"
    yield "  - {on: invalid-input, severity: warning, do: [notify]}"
    yield ""


def _step(after: str, actions: str, clauses: str) -> Iterator[str]:
    yield "  - on: fail"
    yield f"    for: {after}"
    yield "    clear_for: 10m"
    yield "    severity: critical"
    yield f"    do: {actions}"
    yield f"    clauses: [{clauses}]"


def _clause(clause: DraftClause, needed: Sequence[Needed], found: Sequence[NoiseFloor]) -> Iterator[str]:
    yield from _comment(clause.derivation, "  ")
    for one in needed:
        if one.clause == clause.id and one.observations is not None:
            count = f"{one.observations:,} {one.unit}s"
            yield from _comment(f"A PASS takes at least {count}, even from identical kernels.", "  ")
    for floor in found:
        if floor.clause == clause.id:
            yield from _comment(floor_sentence(floor), "  ")
    yield f"  - id: {clause.id}"
    yield f"    metric: {clause.metric}"
    if clause.statistic:
        yield f"    statistic: {clause.statistic}"
    if clause.unit:
        yield f"    unit: {clause.unit}"
    if clause.cap is not None:
        yield f"    cap: {exact(clause.cap)}"
    yield f"    limit: {exact(clause.limit)}"
    if clause.slices:
        yield f"    slices: {_inline({name: exact(limit) for name, limit in clause.slices.items()}, quoted=False)}"
    yield f"    description: {_text(clause.breaks)}"


def floor_sentence(floor: NoiseFloor) -> str:
    """What a recording says about a derived limit."""
    where = "" if floor.slice == ALL else f" on {floor.slice}"
    measured = f"{rounded(floor.estimate)}, at most {rounded(floor.upper)}, from {floor.samples:,} {floor.unit}s"
    match floor.limit_side:
        case "below":
            return (
                f"Noise floor{where}: {measured}. The derived limit, {rounded(floor.limit)}, is below it and would "
                f"fail for ever: self-noise alone is at least {rounded(floor.lower / floor.limit)} times as large."
            )
        case "above":
            return f"Noise floor{where}: {measured}; the derived limit, {rounded(floor.limit)}, is above it."
    return (
        f"Noise floor{where}: {measured}. The recording is too short to say on which side of it the derived limit, "
        f"{rounded(floor.limit)}, is."
    )


def _comment(text: str, indent: str = "") -> Iterable[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False
    )


def _inline(fields: Mapping[str, str], *, quoted: bool = True) -> str:
    shown = ((key, _text(value) if quoted else value) for key, value in fields.items())
    return "{" + ", ".join(f"{_text(key)}: {value}" for key, value in shown) + "}"


def _text(value: str) -> str:
    """Text as YAML reads it back, quoted where it would be anything else."""
    plain = value.replace("-", "").replace("_", "").replace(".", "").replace(" ", "")
    if re.fullmatch(r"\d{1,15}(\.\d{1,15})?", value):
        return value
    words = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
    if (
        plain.isascii()
        and plain.isalnum()
        and plain[0].isalpha()
        and value.lower() not in words
        and value == value.strip()
    ):
        return value
    return json.dumps(value, ensure_ascii=False)
