"""The evaluator's HTTP API."""
