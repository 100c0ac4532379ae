"""Breaks one constant or operator of a file at a time and says which breakages no test notices.

    python tests/tools/mutants.py kc_otel/stats/tokens.py --tests 'tests/bounds -k tokens' [--every 3] [--jobs 2]

Each mutant lives in a copy of the package in a temporary folder; the checkout is never touched. A mutant is killed when
the tests fail, and survives when they pass: then a constant could be wrong and nobody would know. Numbers become one
more, half and double; `<` becomes `<=`, `+` becomes `-`, `min` becomes `max`, and so on. Text, docstrings, the indices
of subscripts, `__all__` and the arguments of `raise` are left alone.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "ceil": "floor", "floor": "ceil",
    "any": "all", "all": "any", "log1p": "log", "expm1": "exp", "fmin": "fmax", "fmax": "fmin",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One breakage: the file's text with it, and where it is."""

    line: int
    what: str
    source: str


class _Mutator(ast.NodeTransformer):
    """Applies the breakage number `wanted`; counts them when it is -1."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.seen, self.what, self.line = wanted, 0, "", 0

    def _next(self, node: ast.AST, what: str) -> bool:
        self.seen += 1
        if self.seen - 1 != self.wanted:
            return False
        self.what, self.line = what, getattr(node, "lineno", 0)
        return True

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if any(isinstance(target, ast.Name) and target.id in {"__all__", "msg"} for target in node.targets):
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            return node
        for value in dict.fromkeys((node.value + 1, node.value / 2, node.value * 2)):
            if value != node.value and self._next(node, f"{node.value!r} -> {value!r}"):
                return ast.copy_location(ast.Constant(value), node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = OPERATORS.get(type(node.op))
        if other is not None and self._next(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = OPERATORS[type(node.op)]
        if self._next(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = OPERATORS.get(type(node.ops[0]))
        if other is not None and self._next(node, f"{type(node.ops[0]).__name__} -> {other.__name__}"):
            node.ops[0] = other()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func
        attribute = "id" if isinstance(name, ast.Name) else "attr" if isinstance(name, ast.Attribute) else ""
        old = getattr(name, attribute, "") if attribute else ""
        if old in NAMES and self._next(node, f"{old} -> {NAMES[old]}"):
            setattr(name, attribute, NAMES[old])
        return node


def mutants(path: Path) -> list[Mutant]:
    """Every breakage of a file."""
    text = path.read_text(encoding="utf-8")
    counter = _Mutator(-1)
    counter.visit(ast.parse(text))
    found = []
    for number in range(counter.seen):
        mutator = _Mutator(number)
        tree = ast.fix_missing_locations(mutator.visit(ast.parse(text)))
        found.append(Mutant(mutator.line, mutator.what, ast.unparse(tree)))
    return found


def survives(mutant: Mutant, path: Path, copy: Path, arguments: list[str], timeout: float) -> bool:
    """Whether the tests pass on a copy of the package with the breakage in it."""
    target = copy / path.relative_to(ROOT)
    before = target.read_text(encoding="utf-8")
    target.write_text(mutant.source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        return not subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=timeout, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False
    finally:
        target.write_text(before, encoding="utf-8")


def main() -> int:
    """Print the survivors; exit code 1 when there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tests", default="tests/bounds -m 'not slow'", help="pytest's arguments, in one string")
    parser.add_argument("--every", type=int, default=1, help="only every so many-th mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=180.0)
    options = parser.parse_args()
    alive = tried = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copy = Path(folder) / str(number)
            for name in ("kc_otel", "tests", "contracts", "examples"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            copies.put(copy)

        def run(job: tuple[Path, Mutant]) -> tuple[Path, Mutant, bool]:
            copy = copies.get()
            try:
                return (*job, survives(job[1], job[0], copy, shlex.split(options.tests), options.timeout))
            finally:
                copies.put(copy)

        whole = Mutant(0, "", options.files[0].read_text(encoding="utf-8"))
        if not survives(whole, options.files[0].resolve(), Path(folder) / "0", shlex.split(options.tests), 10_000.0):
            parser.error(f"the tests fail on what is there, or there are none: pytest {options.tests}")
        jobs = [(path.resolve(), one) for path in options.files for one in mutants(path.resolve())][:: options.every]
        with ThreadPoolExecutor(options.jobs) as pool:
            for path, mutant, survived in pool.map(run, jobs):
                tried += 1
                alive += survived
                if survived:
                    print(f"{path.relative_to(ROOT)}:{mutant.line}: {mutant.what} survives", flush=True)
    print(f"{tried - alive} of {tried} mutants were noticed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
