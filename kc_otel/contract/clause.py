"""A clause: one promise about one statistic of one metric."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from kc_otel.contract.fields import Name, Number, OperatorName, RawLimit, Strict
from kc_otel.contract.registry.clause_metrics import (
    AVERAGED,
    DERIVED,
    OPERATORS,
    QUANTITIES,
    Quantity,
    Unit,
    known_metrics,
)
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import parse_limit

About = Literal["population", "traffic"]
"""Scope of a verdict: `population`, future traffic, too, where observations are independent draws from the slice;
`traffic`, only the measured traffic, where they depend on each other or the statistic is a maximum."""

_STATISTIC: Final = re.compile(
    r"mean|max|p(?P<rank>\d{1,2}(?:\.\d{1,4})?)|fraction\s*>\s*(?P<above>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)


class Statistic(Strict):
    """Statistic of a metric's distribution that a clause limits."""

    kind: Literal["mean", "max", "quantile", "fraction"]
    argument: float = 0.0
    """Rank in (0,1) for a quantile, threshold for a fraction."""

    @classmethod
    def parse(cls, text: str) -> Statistic:
        """Parse `mean`, `max`, `p99.9` or `fraction > 0.5`; raise ValueError for anything else."""
        found = _STATISTIC.fullmatch(text.strip())
        if not found:
            raise ValueError(f"{text!r} is not a statistic; write mean, max, p99.9 or fraction > 0.5")
        if found["rank"] is not None:
            rank = float(found["rank"]) / 100.0
            if not 0.0 < rank < 1.0:
                raise ValueError(f"{text!r} is not a quantile; write a rank between 0 and 100, such as p99.9")
            return cls(kind="quantile", argument=rank)
        if found["above"] is not None:
            return cls(kind="fraction", argument=float(found["above"]))
        return cls(kind="mean" if text.strip() == "mean" else "max")


class Clause(Strict):
    """One promise: a statistic of a metric stays at or below a limit, on every slice."""

    id: Name
    """Name of the clause, unique in the contract."""
    metric: str
    """A metric of the registry (`kc-otel reference metrics` lists them), or a `gen_ai.*` histogram."""
    operator: OperatorName | None = None
    """Operator of an `operator_*` metric: the name that is passed to the recorder's `compare_operator`."""
    statistic: str | None = None
    """mean, max, pXX.X or `fraction > x`; each metric has a default."""
    unit: Literal["token", "sequence", "prompt", "step"] | None = None
    """Unit of an independent observation; dependent values are averaged first. `prompt`, the default of means: the mean
    over a prompt's rollouts, which share its drift; without known prompts, each sequence counts as one. `sequence`:
    sequences are declared independent. `step`: the mean over a training step; the limit then holds on average over
    steps, whereas with the other units it holds at every step. `token`: the verdict covers only the tokens of its
    window. With a unit wider than the metric's own, `fraction > x` is the share of means above x. Quantiles, maxima and
    fractions with limit 0 count tokens by default."""
    limit: RawLimit
    """Largest value allowed, in the metric's unit; durations and percentages may carry their unit."""
    slices: dict[Name, RawLimit] = Field(default_factory=dict, max_length=500)
    """Limits of individual slices, if they differ from `limit`."""
    cap: Number | None = Field(default=None, gt=0)
    """Limit the mean of min(value, cap). This makes the mean of an unbounded metric decidable; with a cap of five times
    the limit, a tenth of the sequences suffices. Limit the values above it with a clause on `fraction > cap`."""
    description: str = Field(default="", max_length=1000)
    """Reason for the limit's value, and the consequence of exceeding it."""

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in known_metrics() and not value.startswith("gen_ai."):
            near = _near(value)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else "`kc-otel reference metrics` lists them, beside gen_ai.*"
            )
            raise ValueError(f"{value!r} is not a metric; {hint}")
        return value

    @field_validator("statistic")
    @classmethod
    def _reads(cls, value: str | None) -> str | None:
        if value is not None:
            Statistic.parse(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Clause:
        # A message that starts with the path of a field is shown at that field's line.
        if self.metric in DERIVED and self.parsed_statistic.kind != "mean":
            raise ValueError(f"statistic: {self.metric} is always a mean; remove statistic")
        if self.opposite is not None and self.cap is not None:
            raise ValueError(f"cap: {self.metric} takes no cap; remove it")
        if self.metric in OPERATORS and self.operator is None:
            raise ValueError(
                f"metric: {self.metric} is measured on single operators; add the name that the recorder's "
                "compare_operator is given, such as `operator: attention`"
            )
        if self.metric not in OPERATORS and self.operator is not None:
            raise ValueError(
                f"operator: {self.metric} is not measured on single operators; remove operator, or choose the metric "
                f"from {', '.join(OPERATORS)}"
            )
        if self.unit is not None:
            self._check_unit()
        for path, raw in (("limit", self.limit), *((f"slices.{name}", raw) for name, raw in self.slices.items())):
            try:
                parse_limit(raw, self.limit_unit)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return self

    def _check_unit(self) -> None:
        native, kind = self._recorded.per if self._recorded else None, self.parsed_statistic.kind
        if native is Unit.SEQUENCE and self.unit == "token":
            msg = f"unit: {self.metric} is observed once per sequence, not per token; remove unit"
        elif native is None:
            msg = f"unit: the sender of {self.metric} decides what one observation is; remove unit"
        elif native is Unit.BATCH or native is Unit.ROW:
            of = "batch" if native is Unit.BATCH else "row of an operator's output"
            msg = f"unit: {self.metric} is observed once per {of}; remove unit"
        elif self.unit == native.value:
            return
        elif kind == "max":
            msg = f"unit: the maximum over {native}s is the same by {self.unit}; remove unit"
        elif kind == "quantile":
            msg = (
                f"unit: {self.statistic_text} of {native}s cannot be judged by {self.unit}: each counts with the "
                f"mean of its {native}s; write `statistic: mean` with a limit for it, or `unit: {native}`"
            )
            if native is Unit.TOKEN:
                msg += ", whose verdicts cover only the measured tokens"
        else:
            return
        raise ValueError(msg)

    @property
    def limit_unit(self) -> str:
        """UCUM unit of the limit: the metric's, or 1 for a fraction."""
        if self.parsed_statistic.kind == "fraction":
            return "1"
        known = QUANTITIES.get(self.metric) or DERIVED.get(self.metric)
        return "s" if known is None else known.unit

    @property
    def quantity(self) -> Quantity | None:
        """The recorded quantity whose observations the statistic is taken of; None for a `gen_ai.*` histogram."""
        known, over = self._recorded, self.averaged
        return AVERAGED.get((known.key, over)) if known is not None and over is not None else known

    @property
    def opposite(self) -> Quantity | None:
        """The quantity that bounds the clause's metric from the other side; None where one quantity says all of it."""
        known, over = DERIVED.get(self.metric), self.averaged
        if known is None or known.opposite is None:
            return None
        return QUANTITIES[known.opposite] if over is None else AVERAGED.get((known.opposite, over))

    @property
    def averaged(self) -> Unit | None:
        """The unit over which observations are averaged before they count; None where each one counts.

        A mean is judged by prompt, unless the clause says otherwise. A share that none may is counted token by token:
        the first that differs is a fact, and of those that do not, the count is the evidence.
        """
        native = None if self._recorded is None else self._recorded.per
        if native is not Unit.TOKEN and native is not Unit.SEQUENCE:
            return None
        if self.unit is not None:
            return None if self.unit == native.value else Unit(self.unit)
        mean = self.parsed_statistic.kind == "mean" and not self.allows_none(ALL)
        return Unit.PROMPT if mean else None

    @property
    def about(self) -> About:
        """Scope of a verdict: future traffic, too, or only the measured traffic.

        Prompts are independent draws from the slice, and so are sequences if the clause says so. Tokens of a sequence,
        rollouts of a prompt, rows and steps depend on each other, and a maximum never tells of future observations.
        """
        quantity = self.quantity
        if quantity is None or self.parsed_statistic.kind == "max":
            return "traffic"
        independent = self.averaged is not None or (quantity.per is Unit.SEQUENCE and self.unit == "sequence")
        return "population" if independent else "traffic"

    @property
    def metric_text(self) -> str:
        """The metric as sentences name it: `tv_token`, `tv_token by prompt`, or `operator_ulp of attention`."""
        if self.operator is not None:
            return f"{self.metric} of {self.operator}"
        recorded = self._recorded
        by_itself = recorded is not None and recorded.per is Unit.SEQUENCE and self.averaged is Unit.PROMPT
        return self.metric if self.averaged is None or by_itself else f"{self.metric} by {self.averaged}"

    @property
    def base(self) -> str:
        """The metric, or what a derived one is computed from."""
        return DERIVED[self.metric].base if self.metric in DERIVED else self.metric

    @property
    def _recorded(self) -> Quantity | None:
        return QUANTITIES.get(self.base)

    @cached_property
    def parsed_statistic(self) -> Statistic:
        """The statistic, the metric's default when the clause names none."""
        if self.statistic is not None:
            return Statistic.parse(self.statistic)
        if self.metric in QUANTITIES:
            return Statistic.parse(QUANTITIES[self.metric].statistic)
        return Statistic.parse("mean" if self.metric in DERIVED else "p99")

    @property
    def statistic_text(self) -> str:
        """The statistic as a contract writes it."""
        parsed = self.parsed_statistic
        if parsed.kind == "quantile":
            return f"p{100 * parsed.argument:.10g}"
        return f"fraction > {parsed.argument:g}" if parsed.kind == "fraction" else parsed.kind

    @property
    def tail_text(self) -> str:
        """Beginning of a clause on the share above the cap: its metric, statistic and unit."""
        of = f", operator: {self.operator}" if self.operator is not None else ""
        unit = self.averaged or self.unit
        per = f", unit: {unit}" if unit is not None else ""
        above = repr(self.cap).removesuffix(".0")
        return f"metric: {self.base}{of}, statistic: fraction > {above}{per}"

    def allows_none(self, slice: str) -> bool:
        """Return True if a slice limits a share (a fraction, or a two-valued quantity's mean over tokens) to 0."""
        known, kind = QUANTITIES.get(self.metric), self.parsed_statistic.kind
        tokens = self.unit == "token" or (self.unit is None and self.limit_for(ALL) == 0.0)
        share = kind == "fraction" or (kind == "mean" and tokens and known is not None and known.two_valued)
        return share and self.limit_for(slice) == 0.0

    def limit_for(self, slice: str) -> float:
        """Limit on a slice, in the metric's unit."""
        return parse_limit(self.limit if slice == ALL else self.slices.get(slice, self.limit), self.limit_unit)


def _near(metric: str) -> list[str]:
    """Metrics that a name may mean: spelled alike, or with a word of it; three at most."""
    from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

    known, name = known_metrics(), metric.lower().replace("-", "_")
    alike = get_close_matches(name, known, n=1)
    words = {word for word in name.split("_") if word}
    sharing = sorted((candidate for candidate in known if words & set(candidate.split("_"))), key=len)
    return list(dict.fromkeys([*alike, *sharing]))[:3]
