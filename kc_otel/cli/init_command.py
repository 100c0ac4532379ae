"""`kc-otel init`: a first contract from a kernel pair and a reward budget."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.terminal import pairs, unusable
from kc_otel.contract.measuring_paths import MeasuringPath
from kc_otel.contract.model import KernelSpec

if TYPE_CHECKING:
    from kc_otel.offline.draft import Written

_KERNEL_FIELDS: Final = tuple(KernelSpec.model_fields)
_CONDITION: Final = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|!=|==|=|>|<)\s*(\S.*?)\s*")


def init(
    reward_budget: Annotated[float, typer.Option(metavar="DRIFT", help="Largest acceptable drift of the mean reward.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write (default: NAME.yaml); - prints it.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="metadata.name, an attribute of every metric.")] = "policy",
    owner: Annotated[str, typer.Option(metavar="TEAM", help="Responsible team or person.")] = "unknown",
    train: Annotated[str, typer.Option(metavar="FIELDS", help="Such as engine=torch,dtype=bfloat16.")] = "engine=torch",
    inference: Annotated[str, typer.Option(metavar="FIELDS", help="Such as engine=vllm,dtype=fp8.")] = "engine=vllm",
    reward_range: Annotated[str, typer.Option(metavar="LOW,HIGH", help="Range of a sequence's reward.")] = "0,1",
    horizon: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Longest answer, in tokens.")] = 4096,
    clip: Annotated[float | None, typer.Option(metavar="EPSILON", help="PPO clip range, if there is one.")] = None,
    slices: Annotated[
        str, typer.Option(metavar="LIST", help="Such as 'code: task=code; long: prompt_tokens>=8192'.")
    ] = "",
    data: Annotated[MeasuringPath, typer.Option(help="How the kernels are measured.")] = MeasuringPath.LOOP,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="RECORDING", help="Recording of a pair that you accept: limits follow from it."),
    ] = None,
    margin: Annotated[float, typer.Option(min=1.0, help="Factor between the baseline and the limits.")] = 2.0,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts with which the baseline typically passes.")] = 400,
) -> None:
    """Write a commented first contract.

    With --baseline, the usual way, token limits follow from a recorded pair of kernels that you accept, and the budget
    is one more clause. Without it, the budget is the only clause on drift.

    Examples:
      kc-otel init --reward-budget 0.05
      kc-otel init --out policy.yaml --reward-budget 0.05 --baseline rollouts.npz
    """
    from kc_otel.offline.draft import Draft, write  # noqa: PLC0415 - a quick --help
    from kc_otel.recordings.recording_files import load_recording  # noqa: PLC0415

    target = out if out is not None else Path(f"{name}.yaml")
    with unusable(ModuleNotFoundError):
        if str(target) != "-" and target.exists():
            raise ValueError(f"--out: {target} exists; remove it, or name another file")
        kernels, where = (_kernel("--train", train), _kernel("--inference", inference)), _slices(slices)
        draft = Draft(name, owner, *kernels, reward_budget, _range(reward_range), horizon, clip, where, data)
        accepted = None if baseline is None else load_recording(baseline)
        written = write(draft, accepted, margin=margin, prompts=prompts)
        if str(target) == "-":
            typer.echo(written.text, nl=False)
        else:
            target.write_text(written.text, encoding="utf-8")
    for line in _summary(written, target):
        typer.echo(line, err=True)


def _kernel(option: str, text: str) -> dict[str, str]:
    fields = pairs(option, text.split(","), "FIELD=VALUE")
    wrong = [field for field in fields if field not in _KERNEL_FIELDS]
    if wrong or "engine" not in fields:
        problem = f"{wrong[0]!r} is no field" if wrong else "no engine"
        known = ", ".join(_KERNEL_FIELDS)
        raise ValueError(f"{option}: {text!r}: {problem}; write engine=vllm,dtype=fp8 with fields of {known}")
    return fields


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not low < high:
        raise ValueError(f"--reward-range: {text!r} is not a range; write the smallest reward first, such as 0,1")
    return low, high


def _slices(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for part in filter(str.strip, text.split(";")):
        name, colon, rest = part.partition(":")
        where: dict[str, str] = {}
        for condition in rest.split(","):
            match = _CONDITION.fullmatch(condition)
            if not colon or match is None:
                said = f"{part.strip()!r} is not a slice; write name: attribute=value or name: attribute>=8192"
                raise ValueError(f"--slices: {said}")
            attribute, sign, value = match.groups()
            said = value if sign in {"=", "=="} else f"{sign} {value}"
            where[attribute] = f"{where[attribute]}, {said}" if attribute in where else said
        found[name.strip()] = where
    return found


def _summary(written: Written, target: Path) -> list[str]:
    from kc_otel.offline.draft import BUDGET  # noqa: PLC0415

    lines = [] if str(target) == "-" else [f"wrote {target}"]
    lines += [
        f"{needed.clause}: a PASS takes at least {needed.observations:,} {needed.unit}s"
        for needed in written.needed
        if needed.minimum_name and needed.observations is not None
    ]
    if written.older:
        lines.append(
            f"{written.older:,} tokens of the baseline were sampled by older weights and are left out: their drift "
            "includes staleness"
        )
    if written.empty:
        slices = f"slice{'s' * (len(written.empty) > 1)} {', '.join(written.empty)}"
        lines.append(f"{slices}: the baseline has no sequence of it; its limits are those of all traffic")
    if written.measured:
        lines.append(f"{', '.join(written.measured)}: limits of the baseline")
        if all(clause.id != BUDGET for clause in written.contract.clauses):
            lines.append(
                f"{BUDGET}: not asked for, because the baseline itself breaks the bound; record rewards, and the drift "
                "is measured"
            )
    if str(target) != "-":
        lines.append(f"next: kc-otel gate plan {target}")
    return lines
