"""`kc-otel init`: a first contract from a kernel pair and a reward budget."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kc_otel.cli.terminal import refuse
from kc_otel.contract.errors import ContractError
from kc_otel.contract.measuring_paths import MeasuringPath
from kc_otel.contract.model import KernelSpec

if TYPE_CHECKING:
    from kc_otel.offline.draft.draft_yaml import Written

_KERNEL_FIELDS: Final = tuple(KernelSpec.model_fields)
_CONDITION: Final = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|!=|==|=|>|<)\s*(\S.*?)\s*")


def init(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write; - prints it.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="metadata.name.")] = None,
    owner: Annotated[str | None, typer.Option(metavar="TEAM", help="Responsible team or person.")] = None,
    train: Annotated[
        str | None, typer.Option(metavar="FIELDS", help="The training kernel, such as engine=torch,dtype=bfloat16.")
    ] = None,
    inference: Annotated[
        str | None, typer.Option(metavar="FIELDS", help="The inference kernel, such as engine=vllm,dtype=fp8.")
    ] = None,
    reward_budget: Annotated[
        str | None, typer.Option(metavar="DRIFT", help="Largest acceptable drift of the mean reward.")
    ] = None,
    reward_range: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="Smallest and largest reward of a sequence. (default: 0,1)")
    ] = None,
    horizon: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Longest answer, in tokens. (default: 4096)")
    ] = None,
    clip: Annotated[str | None, typer.Option(metavar="EPSILON", help="PPO clip range, if there is one.")] = None,
    slices: Annotated[
        str | None, typer.Option(metavar="LIST", help="Slices, such as 'code: task=code; long: prompt_tokens>=8192'.")
    ] = None,
    confidence: Annotated[str | None, typer.Option(metavar="C", help="Confidence of verdicts. (default: 0.99)")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="|".join(MeasuringPath), help="How the kernels are measured. (default: loop)")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="RECORDING",
            help="Recording of a pair that you accept (.npz, .jsonl or .parquet): limits follow from it.",
        ),
    ] = None,
    margin: Annotated[float, typer.Option(min=1.0, help="Factor between the baseline and the limits.")] = 2.0,
    prompts: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of prompts of a gate: limits are high enough that the baseline typically passes with them.",
        ),
    ] = 400,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Accept defaults without asking; only --reward-budget has none.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented first contract; on a terminal, ask for missing values.

    With --baseline, the usual way, token limits follow from a recorded pair of kernels that you accept, and the budget
    is one more clause. Without it, the budget is the only clause on drift; comments explain which token limits would
    guarantee it.

    Examples:
      kc-otel init
      kc-otel init --out policy.yaml --reward-budget 0.05 --baseline rollouts.npz --yes
    """
    given = {
        "train": train,
        "inference": inference,
        "reward_budget": reward_budget,
        "reward_range": reward_range,
        "horizon": horizon,
        "clip": clip,
        "slices": slices,
        "data": data,
        "name": name,
        "owner": owner,
        "confidence": confidence,
    }
    try:
        answers = _answers(given, ask=_on_terminal() and not yes, assume=yes)
        target = out if out is not None else Path(f"{answers['name']}.yaml")
        if str(target) != "-" and target.exists() and not force:
            refuse(f"--out: {target} exists; write --force to overwrite it, or name another file")
        written = _write(answers, baseline, margin=margin, prompts=prompts)
    except ContractError as error:
        refuse("\n".join(f"{p.field}: {p.message}" if p.field else p.message for p in error.problems))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        refuse(str(error))
    if str(target) == "-":
        typer.echo(written.text, nl=False)
    else:
        try:
            target.write_text(written.text, encoding="utf-8")
        except OSError as error:
            refuse(f"--out: {target} cannot be written: {error.strerror or error}")
    for line in _summary(written, target):
        typer.echo(line, err=True)


@dataclass(frozen=True, slots=True)
class _Question:
    """A question. Without a default it must be answered, unless `--yes` may assume an answer."""

    key: str
    why: str
    parse: Callable[[str], Any]
    default: str | None = None
    assumed: str | None = None

    @property
    def option(self) -> str:
        return f"--{self.key.replace('_', '-')}"


def _kernel(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    wrong = [key for key, value in fields.items() if key not in _KERNEL_FIELDS or not value]
    if wrong or "engine" not in fields:
        problem = f"{wrong[0]!r} is no field with a value" if wrong else "no engine"
        raise ValueError(f"{text!r}: {problem}; write engine=vllm,dtype=fp8 with fields of {', '.join(_KERNEL_FIELDS)}")
    return fields


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _whole(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of tokens; write a whole number such as 4096")
    return int(text)


def _range(text: str) -> tuple[float, float]:
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"{text!r} is not a range; write the smallest and the largest reward, such as 0,1")
    low, high = _number(parts[0]), _number(parts[1])
    if not low < high:
        raise ValueError(f"{text!r} is not a range; write the smallest reward first, such as 0,1")
    return low, high


def _optional(text: str) -> float | None:
    return None if text.strip().lower() in {"", "none"} else _number(text)


def _path(text: str) -> MeasuringPath:
    try:
        return MeasuringPath(text.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a way of measuring; write one of {', '.join(MeasuringPath)}") from None


def _slices(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for part in text.split(";"):
        if not part.strip() or text.strip().lower() == "none":
            continue
        name, colon, rest = part.partition(":")
        where: dict[str, str] = {}
        for condition in rest.split(","):
            match = _CONDITION.fullmatch(condition)
            if not colon or match is None:
                msg = f"{part.strip()!r} is not a slice; write name: attribute=value or name: attribute>=8192"
                raise ValueError(msg)
            attribute, sign, value = match.groups()
            said = value if sign in {"=", "=="} else f"{sign} {value}"
            where[attribute] = f"{where[attribute]}, {said}" if attribute in where else said
        found[name.strip()] = where
    return found


_QUESTIONS: Final = (
    _Question(
        "train",
        "The kernel that gradients are taken through, or the reference: engine=torch,dtype=bfloat16",
        _kernel,
        assumed="engine=torch",
    ),
    _Question("inference", "The kernel that samples: engine=vllm,dtype=fp8", _kernel, assumed="engine=vllm"),
    _Question("reward_range", "Smallest and largest reward of a sequence", _range, "0,1"),
    _Question("reward_budget", "How far the mean reward may move because of the kernels alone, such as 0.02", _number),
    _Question("horizon", "Longest answer in tokens: per-token limits shrink with it", _whole, "4096"),
    _Question("clip", "PPO clip range epsilon, or none", _optional, "none"),
    _Question(
        "slices", "Traffic to judge on its own: code: task=code; long: prompt_tokens>=8192, or none", _slices, "none"
    ),
    _Question(
        "data",
        f"How the kernels are measured: {', '.join(MeasuringPath)}; loop is a program of your own",
        _path,
        "loop",
    ),
    _Question("name", "Name of the contract: an attribute of every metric, short and stable", str, "policy"),
    _Question("owner", "Responsible team or person", str, assumed="unknown"),
    _Question("confidence", "Confidence of verdicts", _number, "0.99"),
)


def _on_terminal() -> bool:
    return sys.stdin.isatty()


def _answers(given: dict[str, str | None], *, ask: bool, assume: bool = False) -> dict[str, Any]:
    """Every answer, parsed: as given, asked for, by default, or assumed.

    Raises:
        ValueError: If an answer cannot be read, or one that has no default is missing and nobody can be asked.
    """
    if assume:
        given = {
            question.key: question.assumed if given[question.key] is None else given[question.key]
            for question in _QUESTIONS
        }
    missing = [question.option for question in _QUESTIONS if question.default is None and given[question.key] is None]
    if missing and not ask:
        msg = f"{', '.join(missing)}: missing, and this is not a terminal; give {'it' if len(missing) == 1 else 'them'}"
        raise ValueError(msg)
    return {question.key: _answer(question, given[question.key], ask=ask) for question in _QUESTIONS}


def _answer(question: _Question, text: str | None, *, ask: bool) -> Any:
    if text is None and ask:
        typer.echo(f"{question.why}.", err=True)
        while True:
            text = typer.prompt(f"  {question.option[2:]}", default=question.default, err=True)
            try:
                return question.parse(text)
            except ValueError as error:
                typer.echo(f"  {error}", err=True)
    text = question.default if text is None else text
    assert text is not None
    try:
        return question.parse(text)
    except ValueError as error:
        raise ValueError(f"{question.option}: {error}") from None


def _write(answers: dict[str, Any], baseline: Path | None, *, margin: float, prompts: int) -> Written:
    from kc_otel.offline.draft.draft import Draft  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.draft.draft_yaml import write  # noqa: PLC0415

    loaded = None
    if baseline is not None:
        from kc_otel.recordings.recording_files import load_recording  # noqa: PLC0415

        loaded = load_recording(baseline)
    return write(Draft(**answers), loaded, margin=margin, prompts=prompts)


def _summary(written: Written, target: Path) -> list[str]:
    from kc_otel.offline.draft.draft_yaml import BUDGET  # noqa: PLC0415

    lines = [] if str(target) == "-" else [f"wrote {target}"]
    lines += [
        f"{needed.clause}: a PASS takes at least {needed.observations:,} {needed.unit}s"
        for needed in written.needed
        if needed.minimum_name and needed.observations is not None
    ]
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
