"""Served requests on disk, between the process that serves them and the one that scores them again."""

from kc_otel.recordings.spool.spool_file import SpoolError
from kc_otel.recordings.spool.spool_reader import SpoolReader
from kc_otel.recordings.spool.spool_writer import Spool, SpoolStats

__all__ = ["Spool", "SpoolError", "SpoolReader", "SpoolStats"]
