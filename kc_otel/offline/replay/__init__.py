"""Recorded OTLP, judged again: what a contract would have said and done, and how another one differs."""
