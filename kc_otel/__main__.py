"""The command `kc-otel`, also as `python -m kc_otel`: it can say what to install before there is a command line."""

import sys

from kc_otel._extras import MissingExtraError


def main() -> None:
    """Entry point of the console script: exit code 2 where an extra is missing."""
    try:
        from kc_otel.cli import main as command  # noqa: PLC0415 - the extra `cli` may be missing

        command()
    except MissingExtraError as error:
        print(f"kc-otel: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
