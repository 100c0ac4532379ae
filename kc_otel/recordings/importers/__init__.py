"""What other trainers already write, turned into the same OTLP stream as live instrumentation."""

from kc_otel.recordings.importers.detect import FORMATS, Format, files_of, format_of
from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals
from kc_otel.recordings.importers.importer import Importer, ImportTotals

__all__ = [
    "FORMATS",
    "Format",
    "ImportFileError",
    "ImportTotals",
    "Imported",
    "Importer",
    "Refusals",
    "files_of",
    "format_of",
]
