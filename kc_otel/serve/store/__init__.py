"""What the evaluator must not forget, in one SQLite file, and the traffic that it records."""
