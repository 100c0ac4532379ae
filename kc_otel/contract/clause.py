"""A clause: one promise about one statistic of one metric."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from kc_otel.contract.fields import Name, Number, OperatorName, RawLimit, Strict
from kc_otel.contract.registry import BY_SEQUENCE, DERIVED, OPERATORS, QUANTITIES, Quantity, Unit, known_metrics
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import parse_limit

__all__ = ["About", "Clause", "Statistic"]

About = Literal["population", "traffic"]
"""What a verdict is about: `population`, what the slice will show, where sequences are the observations; `traffic`,
what this window saw, where they depend on each other or the largest of them is taken."""

_STATISTIC: Final = re.compile(
    r"mean|max|p(?P<rank>\d{1,2}(?:\.\d{1,4})?)|fraction\s*>\s*(?P<above>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)


class Statistic(Strict):
    """What of a metric's distribution a clause limits."""

    kind: Literal["mean", "max", "quantile", "fraction"]
    argument: float = 0.0
    """Rank in (0,1) for a quantile, threshold for a fraction."""

    @classmethod
    def parse(cls, text: str) -> Statistic:
        """From `mean`, `max`, `p99.9` or `fraction > 0.5`.

        Raises:
            ValueError: If it is none of these.
        """
        found = _STATISTIC.fullmatch(text.strip())
        if not found:
            msg = f"{text!r} is not a statistic; write mean, max, p99.9 or fraction > 0.5"
            raise ValueError(msg)
        if found["rank"] is not None:
            rank = float(found["rank"]) / 100.0
            if not 0.0 < rank < 1.0:
                msg = f"{text!r} is not a quantile; ranks lie between p0 and p100, both excluded"
                raise ValueError(msg)
            return cls(kind="quantile", argument=rank)
        if found["above"] is not None:
            return cls(kind="fraction", argument=float(found["above"]))
        return cls(kind="mean" if text.strip() == "mean" else "max")


class Clause(Strict):
    """One promise: a statistic of a metric stays at or below a limit, on every slice."""

    id: Name
    """Name of the clause, unique in the contract."""
    metric: str
    """A metric of the registry (`kc-otel metrics` lists them), or a `gen_ai.*` histogram."""
    operator: OperatorName | None = None
    """Operator that an `operator_*` metric is about: the name that the recorder's `compare_operator` is given."""
    statistic: str | None = None
    """mean, max, pXX.X or `fraction > x`; each metric has a default."""
    unit: Literal["token", "sequence"] | None = None
    """What counts as one independent observation. Tokens of one sequence depend on each other: by default, and with
    `sequence`, the mean of a token metric is the mean over sequences of each one's mean, and a verdict is about what
    the slice will show; with `token`, it is about the tokens of its window only. A fraction with `sequence` is the
    share of sequences whose mean is above x, and counts tokens otherwise. A quantile or the largest of tokens has no
    form by sequence, nor has by default a share that none may (limit 0): these count tokens."""
    limit: RawLimit
    """Largest value allowed, in the metric's unit; durations and percentages may carry their unit."""
    slices: dict[Name, RawLimit] = Field(default_factory=dict, max_length=500)
    """Limits of single slices, where they differ."""
    cap: Number | None = Field(default=None, gt=0)
    """The promise is about the mean of min(value, cap) of what is observed: decidable for an unbounded metric, and with
    five limits as the cap decided by a tenth of the sequences. What lies above it, a clause on the fraction above it
    limits."""
    description: str = Field(default="", max_length=1000)
    """Why the limit has its value, and what breaks beyond it."""

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in known_metrics() and not value.startswith("gen_ai."):
            from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

            near = get_close_matches(value, known_metrics(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(known_metrics())}, or gen_ai.*"
            msg = f"{value!r} is not a metric; {hint}"
            raise ValueError(msg)
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
            msg = f"statistic: {self.metric} is defined by a mean; leave the statistic out"
            raise ValueError(msg)
        if self.opposite is not None and self.cap is not None:
            msg = f"cap: {self.metric} has no tail to cut; leave the cap out"
            raise ValueError(msg)
        if self.metric in OPERATORS and self.operator is None:
            msg = (
                f"metric: {self.metric} is observed of single operators; name one, such as `operator: attention`, as "
                "the recorder's compare_operator names it"
            )
            raise ValueError(msg)
        if self.metric not in OPERATORS and self.operator is not None:
            msg = (
                f"operator: {self.metric} is not observed of single operators; leave the operator out, or write one "
                f"of {', '.join(OPERATORS)} as the metric"
            )
            raise ValueError(msg)
        if self.unit is not None:
            self._check_unit()
        for path, raw in (("limit", self.limit), *((f"slices.{name}", raw) for name, raw in self.slices.items())):
            try:
                parse_limit(raw, self.limit_unit)
            except ValueError as error:
                msg = f"{path}: {error}"
                raise ValueError(msg) from None
        return self

    def _check_unit(self) -> None:
        native, kind = self._recorded.per if self._recorded else None, self.parsed_statistic.kind
        if native is Unit.SEQUENCE and self.unit == "token":
            msg = f"unit: {self.metric} is observed once per sequence, not per token; leave the unit out"
        elif native is None:
            msg = f"unit: what one observation of {self.metric} is, its sender decides; leave the unit out"
        elif native is Unit.BATCH or native is Unit.ROW:
            of = "batch" if native is Unit.BATCH else "row of an operator's output"
            msg = f"unit: {self.metric} is observed once per {of}; leave the unit out"
        elif self.unit == "sequence" and kind == "max":
            msg = "unit: the largest token is the largest of any sequence too; leave the unit out"
        elif self.unit == "sequence" and kind == "quantile":
            msg = (
                f"unit: {self.statistic_text} of tokens cannot be judged by sequence: a sequence is observed through "
                "the mean of its tokens, which does not tell what single tokens do; write `statistic: mean` with a "
                "limit for it, or `unit: token`: the verdict is then about this window's tokens"
            )
        else:
            return
        raise ValueError(msg)

    @property
    def limit_unit(self) -> str:
        """UCUM unit of the limit: the metric's, or 1 for a fraction."""
        if self.parsed_statistic.kind == "fraction":
            return "1"
        if self.metric in QUANTITIES:
            return QUANTITIES[self.metric].unit
        if self.metric in DERIVED:
            return DERIVED[self.metric].unit
        return "s"

    @property
    def quantity(self) -> Quantity | None:
        """The recorded quantity whose observations the statistic is taken of; None for a `gen_ai.*` histogram."""
        known = self._recorded
        return BY_SEQUENCE[known.key] if known is not None and self.by_sequence else known

    @property
    def opposite(self) -> Quantity | None:
        """The quantity that bounds the clause's metric from the other side; None where one quantity says all of it."""
        known = DERIVED.get(self.metric)
        return QUANTITIES[known.opposite] if known is not None and known.opposite is not None else None

    @property
    def by_sequence(self) -> bool:
        """Whether a token metric's means over sequences are judged, and not its tokens.

        They are wherever they can be, unless the clause says `unit: token`. A share that none may is counted token by
        token: the first that differs is a fact, and of those that do not, the count is the evidence.
        """
        if self.unit == "token" or self._recorded is None or self._recorded.per is not Unit.TOKEN:
            return False
        return self.unit == "sequence" or (self.parsed_statistic.kind == "mean" and not self.allows_none(ALL))

    @property
    def about(self) -> About:
        """Whether a verdict speaks of what the slice will show, or of what this window saw only.

        Sequences are drawn anew from the slice, so an interval over them holds for those to come. The tokens of one
        sequence, the rows of one output, the steps of one run depend on each other, and of what a `gen_ai.*` histogram
        observed only its sender knows whether it does: an interval over them holds for those that were observed. About
        a maximum nothing is claimed beyond what was seen.
        """
        quantity = self.quantity
        of_sequences = quantity is not None and quantity.per is Unit.SEQUENCE
        return "population" if of_sequences and self.parsed_statistic.kind != "max" else "traffic"

    @property
    def metric_text(self) -> str:
        """The metric as sentences name it: `tv_token`, `tv_token by sequence`, or `operator_ulp of attention`."""
        if self.operator is not None:
            return f"{self.metric} of {self.operator}"
        return f"{self.metric} by sequence" if self.by_sequence else self.metric

    @property
    def _recorded(self) -> Quantity | None:
        return QUANTITIES.get(DERIVED[self.metric].base if self.metric in DERIVED else self.metric)

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
        """What a clause on the share above the cap begins with: its metric, statistic and unit."""
        metric = DERIVED[self.metric].base if self.metric in DERIVED else self.metric
        of = f", operator: {self.operator}" if self.operator is not None else ""
        per = ", unit: sequence" if self.by_sequence else ", unit: token" if self.unit == "token" else ""
        above = repr(self.cap).removesuffix(".0")
        return f"metric: {metric}{of}, statistic: fraction > {above}{per}"

    def allows_none(self, slice: str) -> bool:
        """Whether a share is limited to 0 on a slice: one observation breaks the promise, and while none does it holds.

        A share is a fraction, or the mean over tokens of a quantity that has two values: with `unit: token`, and where
        nothing is allowed on `all`.
        """
        known, kind = QUANTITIES.get(self.metric), self.parsed_statistic.kind
        tokens = self.unit == "token" or (self.unit is None and self.limit_for(ALL) == 0.0)
        share = kind == "fraction" or (kind == "mean" and tokens and known is not None and known.two_valued)
        return share and self.limit_for(slice) == 0.0

    def limit_for(self, slice: str) -> float:
        """Limit on a slice, in the metric's unit."""
        return parse_limit(self.limit if slice == ALL else self.slices.get(slice, self.limit), self.limit_unit)
