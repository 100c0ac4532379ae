"""The command `kc-otel`, also as `python -m kc_otel`: it can say what to install before there is a command line."""

import sys
import traceback
from typing import Final

from kc_otel._extras import MissingExtraError

_UNFORESEEN_ERROR: Final = 70
"""Exit code, EX_SOFTWARE of sysexits.h: 1 is an answer of many commands."""


def main() -> None:
    """Entry point of the console script: exit code 2 where an extra is missing, 70 for an error that nobody foresaw."""
    try:
        from kc_otel.cli import main as command  # noqa: PLC0415 - the extra `cli` may be missing

        try:
            command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except MissingExtraError as error:
        print(f"kc-otel: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except Exception:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        sys.stdout = sys.stderr  # at the exit, Python writes what a full disk has not taken again, and ends with 120
        sys.exit(_UNFORESEEN_ERROR)


if __name__ == "__main__":
    main()
