"""Importers that turn the files of other trainers into the OTLP stream of live instrumentation."""
