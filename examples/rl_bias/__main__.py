"""`python -m examples.rl_bias`: true bias of the policy gradient against every bound, by enumeration.

`--quick` stays below five steps. `--write-readme` puts the tables into this folder's README.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

from examples.rl_bias import long_horizons, tables
from examples.rl_bias.exact import Pair, Training
from examples.rl_bias.kernels import FAMILIES, Family, train_log_probs
from examples.rl_bias.policy import Policy

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
SEED = 0
TABLED = (2, 4, 8)
SIZES = (1_000, 100_000)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.rl_bias", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="horizons up to 4: a few seconds")
    parser.add_argument("--write-readme", action="store_true", help="put the tables into the README")
    options = parser.parse_args(arguments)
    if options.quick and options.write_readme:
        parser.error("--write-readme needs the whole run; leave --quick out")

    longest = 4 if options.quick else 8
    pairs = enumerated(longest)
    found = results(pairs, longest)
    print(found)
    if options.write_readme:
        README.write_text(with_results(README.read_text(encoding="utf-8"), found), encoding="utf-8")
        print(f"wrote {README}")
    return 0


def enumerated(longest: int) -> tables.Pairs:
    """Pairs of kernels by family, scale and horizon; each is enumerated once.

    A shorter horizon's log-probs are the first steps of a longer one's.
    """
    policy = Policy.random(SEED)
    train = train_log_probs(policy, longest)

    @cache
    def training(horizon: int) -> Training:
        return Training(policy, train[:horizon])

    @cache
    def inference(family: Family, scale: float) -> list:
        return family.log_probs(policy, longest, scale)

    @cache
    def pair(family: Family, scale: float, horizon: int) -> Pair:
        return Pair(training(horizon), inference(family, scale)[:horizon])

    return pair


def results(pairs: tables.Pairs, longest: int) -> str:
    """All tables as Markdown."""
    horizons = [horizon for horizon in TABLED if horizon <= longest]
    cases = tables.references(pairs, horizons)
    everything = [
        (family, pairs(family, scale, horizon))
        for family in FAMILIES
        for scale in family.scales
        for horizon in range(1, min(longest, 6) + 1)
    ]
    everything.extend(tables.references(pairs, range(7, longest + 1)))
    found = [
        tables.drift(cases),
        tables.bias(cases),
        tables.summary(everything),
        tables.corrected(cases),
        tables.support(pairs, horizons),
        tables.estimates(cases, SIZES),
    ]
    if longest >= TABLED[-1]:
        found += [long_horizons.reward_drift(), long_horizons.gradient_bias()]
    return "\n".join(table.markdown() for table in found)


def with_results(readme: str, found: str) -> str:
    """The README with what lies between its markers replaced.

    Raises:
        ValueError: If a marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README}: has to contain {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{found}{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
