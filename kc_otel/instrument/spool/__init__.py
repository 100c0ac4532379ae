"""Served requests on disk, between the process that serves them and the one that scores them again."""

from kc_otel.instrument.spool.reader import SpoolReader
from kc_otel.instrument.spool.store import SpoolError
from kc_otel.instrument.spool.writer import Spool, SpoolStats

__all__ = ["Spool", "SpoolError", "SpoolReader", "SpoolStats"]
