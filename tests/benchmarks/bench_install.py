"""What each extra adds to an environment, and how long an import takes there.

    python tests/benchmarks/bench_install.py [EXTRA...]

Each row is a virtual environment of its own, made from a wheel of this checkout by pip: bytes of files, bytecode
included, without pip and the standard library. An import's time is the CPU time of `import` in a fresh process, the
median of several, beside that of importing NumPy there. torch, vLLM and TRL are left out: they weigh what their makers
say.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")
EXTRAS = ("", "stats", "cli", "serve", "openfeature", "parquet", "plots", "grafana")
IMPORTED = {"": "kc_otel.record.recorder", "cli": "kc_otel.cli", "serve": "kc_otel.serve.server"}
"""What stands for the extra in the column of imports; others are imported where they are used."""
TRIES = 5


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """Makes a virtual environment with the wheel and one extra; returns its folder."""
    made = folder / (extra or "core")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([*PIP, "--python", made / "bin" / "python", "install", wanted], check=True)
    return made


def seconds(made: Path, module: str) -> float:
    """CPU time of an import in a fresh process."""
    source = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    command = [made / "bin" / "python", "-I", "-c", source]
    return statistics.median(float(subprocess.check_output(command)) for _ in range(TRIES))


def megabytes(folder: Path) -> float:
    """Bytes of all files, in millions."""
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6


def main() -> None:
    """Prints one line for each extra."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="which; all that make sense without a GPU")
    wanted = dict.fromkeys(("", *(parser.parse_args().extras or EXTRAS)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY], check=True)
        (wheel,) = folder.glob("*.whl")
        print(f"{'environment':<22}{'MB':>6}{'added':>7}   import, ms")
        core = 0.0
        for extra in wanted:
            made = environment(folder, wheel, extra)
            size = megabytes(made / "lib")
            core = core or size
            modules = ["numpy", "kc_otel", *filter(None, [IMPORTED.get(extra)])]
            times = ", ".join(f"{module} {seconds(made, module) * 1e3:.0f}" for module in modules)
            print(
                f"{f'kc-otel[{extra}]' if extra else 'kc-otel':<22}{size:>6.0f}{size - core:>7.0f}   {times}",
                flush=True,
            )


if __name__ == "__main__":
    main()
