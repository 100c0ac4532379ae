"""What other trainers already write, turned into the same OTLP stream as live instrumentation."""

from kc_otel.instrument.importers.detect import FORMATS, Format, files_of, format_of
from kc_otel.instrument.importers.model import Imported, ImportFileError, Refusals
from kc_otel.instrument.importers.run import Importer, Totals

__all__ = [
    "FORMATS",
    "Format",
    "ImportFileError",
    "Imported",
    "Importer",
    "Refusals",
    "Totals",
    "files_of",
    "format_of",
]
