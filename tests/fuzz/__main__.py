"""`python -m tests.fuzz SECONDS [NAME...]`: each parser under Atheris for so long, guided by what it reaches."""

import logging
import subprocess
import sys
import tempfile
from pathlib import Path


def fuzz_parser(name: str, seconds: int) -> None:
    """Fuzz one parser in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["kc_otel"]):
        from tests.fuzz.parsers import PARSERS, SEEDS

    logging.getLogger("kc_otel").setLevel(logging.CRITICAL)  # what is left out is said, thousands of times
    parse = PARSERS[name]
    corpus = Path(tempfile.mkdtemp(prefix=f"kc-otel-fuzz-{name}-"))
    for number, seed in enumerate(SEEDS.get(name, [])):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", "-timeout=20", "-max_len=8192", "-verbosity=0"]
    atheris.Setup([sys.argv[0], str(corpus), *options], parse)
    atheris.Fuzz()


def main(seconds: int, names: list[str]) -> int:
    """Fuzz one after the other; 1 when one of them failed, whose input libFuzzer has written to a file."""
    from tests.fuzz.parsers import PARSERS

    failed = []
    for name in names or PARSERS:
        print(f"{name}: {seconds} s", flush=True)
        if subprocess.run([sys.executable, "-m", "tests.fuzz", "--one", name, str(seconds)], check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "nothing was found")
    return int(bool(failed))


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        fuzz_parser(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
