"""Durable state of the evaluator, in one SQLite file and one unit of work, and its recorded traffic."""
