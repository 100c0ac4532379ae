"""pytest's fixture `kernel_contract`: a test that holds an inference kernel to its contract, beside a control arm.

A control arm is a kernel against itself: the same tokens again, in other batches or another run. A limit that not even
that keeps says nothing of the inference kernel: a test with such a limit passes on one day and fails on the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:  # every run of pytest loads this file, and few use it
    from kc_otel.contract.model import Contract
    from kc_otel.judge.verdict import Verdict
    from kc_otel.report.notebook import JudgedComparison, Slices

__all__ = ["BrokenContractError", "ControlledComparison", "ControlledVerdict", "Held", "KernelContractCheck"]

_PROPERTY: Final = "kernel_contract"
_FOLDER: Final = "--kernel-contract-report"


class Held(StrEnum):
    """What a comparison and its control arms say of one clause on one slice, the worst first."""

    REFUSED = "REFUSED"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"
    PASS = "PASS"  # noqa: S105 - a verdict


class BrokenContractError(AssertionError):
    """A comparison of which not everything passed; its text has a line for each clause and slice."""


@dataclass(frozen=True, slots=True)
class ControlledVerdict:
    """A verdict beside those of the control arms.

    Attributes:
        verdict: Of the inference kernel against the training kernel.
        controls: Of each control arm under the same clause on the same slice, by its argument's name.
    """

    verdict: Verdict
    controls: Mapping[str, Verdict]

    @property
    def held(self) -> Held:
        """REFUSED where a control arm FAILs, then FAIL, then UNDECIDED unless everything is PASS."""
        from kc_otel.judge.verdict import Status  # noqa: PLC0415

        if any(one.status is Status.FAIL for one in self.controls.values()):
            return Held.REFUSED
        if self.verdict.status is Status.FAIL:
            return Held.FAIL
        passed = all(one.status is Status.PASS for one in (self.verdict, *self.controls.values()))
        return Held.PASS if passed else Held.UNDECIDED

    def __str__(self) -> str:
        from kc_otel.contract.words import number, place  # noqa: PLC0415

        one = self.verdict
        arms = "".join(f"; {name} {_measured(control)}" for name, control in self.controls.items())
        line = f"{self.held:<9} {one.cell.clause} on {place(one.cell.slice)}: {_measured(one)}{arms}"
        line += f"; limit {number(one.limit)}"
        if self.held is Held.REFUSED:
            return f"{line}\n          the limit lies below the noise of a kernel against itself: no kernel can keep it"
        if self.held is Held.UNDECIDED:
            return f"{line}\n          {self._undecided()}"
        return line

    def _undecided(self) -> str:
        from kc_otel.judge.verdict import Status  # noqa: PLC0415

        arms = {"the comparison": self.verdict, **self.controls}
        return "; ".join(f"{name}: {one.reason}" for name, one in arms.items() if one.status is not Status.PASS)


def _measured(one: Verdict) -> str:
    from kc_otel.contract.words import interval, number  # noqa: PLC0415
    from kc_otel.judge.plain_json import finite_or_none  # noqa: PLC0415

    bounds = interval(finite_or_none(one.lower), finite_or_none(one.upper))
    return f"{number(finite_or_none(one.estimate))} ({bounds})"


@dataclass(frozen=True, slots=True)
class ControlledComparison:
    """Two kernels under a contract, and each control arm under the same contract.

    Attributes:
        found: The inference kernel against the training kernel.
        controls: A kernel against itself, by the argument that gave it: `train_again`, `inference_again`.
        allow_unjudged: Whether clauses that log-probabilities say nothing of may be left out.
    """

    found: JudgedComparison
    controls: Mapping[str, JudgedComparison]
    allow_unjudged: bool = False

    @property
    def verdicts(self) -> tuple[ControlledVerdict, ...]:
        """One for each clause and slice, the worst first."""
        arms = {name: {one.cell: one for one in arm.verdicts} for name, arm in self.controls.items()}
        beside = (
            ControlledVerdict(one, {name: arm[one.cell] for name, arm in arms.items()}) for one in self.found.verdicts
        )
        return tuple(sorted(beside, key=lambda one: list(Held).index(one.held)))

    @property
    def held(self) -> Held:
        """The worst of all; UNDECIDED without any, or where a clause is not judged that may not be left out."""
        unjudged = not self.found.verdicts or (self.found.left_out and not self.allow_unjudged)
        return min([*(one.held for one in self.verdicts), *[Held.UNDECIDED] * bool(unjudged)], key=list(Held).index)

    def __str__(self) -> str:
        contract = f"{self.found.contract.name} v{self.found.contract.metadata.version}"
        head = f"{self.held} under {contract}: {self.found.sequences:,} sequences, {self.found.tokens:,} tokens"
        left_out = (f"  not judged: {one}" for one in self.found.left_out)
        notes = (f"  note: {arm.coarse}" for arm in (self.found, *self.controls.values()) if arm.coarse)
        return "\n".join([head, *(f"  {one}" for one in self.verdicts), *left_out, *dict.fromkeys(notes)])


class KernelContractCheck:
    """Compares two kernels under a contract, and fails the test unless every clause passes on every slice.

    Args:
        request: The test that asks.
        folder: Where to write an HTML report of each comparison, if anywhere.
    """

    def __init__(self, request: pytest.FixtureRequest, folder: Path | None = None) -> None:
        self._node = request.node
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        train: Any,
        inference: Any,
        *,
        contract: Contract | str | Path,
        train_again: Any = None,
        inference_again: Any = None,
        slices: Slices | None = None,
        mask: Any = None,
        advantages: Any = None,
        allow_unjudged: bool = False,
    ) -> ControlledComparison:
        """Judge, and fail the test unless everything passes.

        Intervals and statuses are those of `kc_otel.compare`.

        Args:
            train: log P(y), nats, under the training kernel: [sequences, tokens], NumPy or torch, or a list of
                sequences of different lengths.
            inference: log Q(y) of the same tokens under the kernel that sampled them.
            contract: The contract, or the path of its file.
            train_again: `train` once more, the same tokens in other batches or another run: its own noise.
            inference_again: `inference` once more.
            slices: What decides the contract's slices, as `kc_otel.compare` takes it.
            mask: Which tokens count.
            advantages: Per token, or per sequence.
            allow_unjudged: Leave out clauses that log-probabilities say nothing of, instead of being UNDECIDED.

        Returns:
            What was found; everything in it is PASS.

        Raises:
            BrokenContractError: If a clause does not pass on a slice: it FAILs, it is undecided on so few sequences, or
                its limit lies below the noise of a control arm.
            TypeError: Without a control arm, or where it is the very array that it is compared with.
            ValueError: If arguments do not fit.
            RecordingError: If the sides cannot be compared.
        """
        __tracebackhide__ = True
        from kc_otel.report.notebook import compare  # noqa: PLC0415

        arms = {"train_again": (train_again, train), "inference_again": (inference_again, inference)}
        arms = {name: arm for name, arm in arms.items() if arm[0] is not None}
        if not arms:
            msg = (
                "kernel_contract needs a control arm: train_again= or inference_again=, log-probabilities of the same "
                "tokens by the same kernel in other batches; without it nobody knows whether a limit can be kept"
            )
            raise TypeError(msg)
        for name, (again, once) in arms.items():
            if again is once:
                msg = (
                    f"{name}: it is what it is compared with; run the kernel again on the same tokens, in other batches"
                )
                raise TypeError(msg)

        def judged(one: Any, other: Any) -> JudgedComparison:
            return compare(one, other, contract=contract, slices=slices, mask=mask, advantages=advantages)

        result = ControlledComparison(
            judged(train, inference), {name: judged(*arm) for name, arm in arms.items()}, allow_unjudged
        )
        self._keep(result)
        if result.held is not Held.PASS:
            raise BrokenContractError(str(result))
        return result

    def _keep(self, result: ControlledComparison) -> None:
        """For the summary at the end, JUnit XML, and the folder of reports; properties reach both through xdist."""
        self._count += 1
        self._node.user_properties.append((_PROPERTY, str(result)))
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "_", self._node.nodeid)[-150:]
            for arm, one in {"": result.found, **result.controls}.items():
                path = self._folder / f"{name}-{self._count}{'-' * bool(arm)}{arm}.html"
                path.write_text(one.html(), encoding="utf-8")


@pytest.fixture
def kernel_contract(request: pytest.FixtureRequest) -> KernelContractCheck:
    """Holds an inference kernel to a contract, with a control arm: `kernel_contract(train, inference, ...)`."""
    folder = request.config.getoption(_FOLDER)
    return KernelContractCheck(request, Path(folder) if folder else None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the reports' folder."""
    parser.getgroup("kernel contracts").addoption(
        _FOLDER, metavar="DIR", default=None, help="write an HTML report of each kernel_contract(...) into DIR"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each comparison measured, of tests that passed too: how near a limit is, is seen before it breaks."""
    lines = list(_summary(terminalreporter))
    if lines:
        terminalreporter.section("kernel contracts")
        for line in lines:
            terminalreporter.write_line(line)


def _summary(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if getattr(report, "when", "") == "call":
                texts = [text for name, text in report.user_properties if name == _PROPERTY]
                if outcome == "failed":  # the failure itself says the rest
                    texts = [text.partition("\n")[0] for text in texts]
                for text in texts:
                    yield f"{report.nodeid}: {text}"
