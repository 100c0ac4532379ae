"""Numbers as the explanation writes them: rounded to the side on which the statement stays true."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import Final

__all__ = ["one_in", "rounded", "rounded_down", "rounded_up", "with_unit"]

_UNITS: Final = {"1": "", "{nat}": " nat", "s": " s", "{step}": " steps", "{ulp}": " ulp"}
_NOISE: Final = 1e-9
"""What floating-point arithmetic may have added is not rounded away from."""


def rounded(value: float, digits: int = 3) -> str:
    """The nearest number of a few significant digits.

    >>> rounded(0.0707106), rounded(4.8828125e-06), rounded(16384.2), rounded(1.0)
    ('0.0707', '4.88e-06', '16,384', '1')
    """
    return _text(value, digits, ROUND_HALF_EVEN)


def rounded_up(value: float, digits: int = 3) -> str:
    """For an upper bound: a number of a few digits that is not below it.

    >>> rounded_up(0.0707106), rounded_up(0.05)
    ('0.0708', '0.05')
    """
    return _text(value * (1.0 - _NOISE), digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 3) -> str:
    """For a limit that is enough, or a lower bound: a number of a few digits that is not above it.

    >>> rounded_down(0.003125), rounded_down(0.05)
    ('0.00312', '0.05')
    """
    return _text(value * (1.0 + _NOISE), digits, ROUND_FLOOR)


def with_unit(text: str, unit: str) -> str:
    """A number with its UCUM unit in words."""
    return f"{text}{_UNITS.get(unit, ' ' + unit)}"


def one_in(share: float, noun: str) -> str:
    """A share as people count: `1 token in 14`, never less than it is.

    >>> one_in(0.0707, "token"), one_in(0.6, "token")
    ('1 token in 14', '60 % of tokens')
    """
    if share <= 0.0:
        return f"no {noun}"
    if share > 0.5:
        return f"{rounded_up(100.0 * share)} % of {noun}s"
    return f"1 {noun} in {_text(float(math.floor(1.0 / share)), 3, ROUND_FLOOR)}"


def _text(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value) or value == 0.0:
        return "0" if value == 0.0 else "infinity" if value > 0 else "-infinity"
    if abs(value) >= 10 ** (digits - 1):
        whole = Decimal(value).to_integral_value(rounding)
        return f"{whole:,}" if abs(value) < 1e12 else f"{value:.{digits}g}"
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(value))):.{digits}g}"
