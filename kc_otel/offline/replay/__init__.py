"""Replay of recorded OTLP: the verdicts and actions of a contract, and its differences from another."""
