"""`python -m kc_otel.cli`: the command, without its script on the PATH."""

from kc_otel.cli import main

main()
