"""What the evaluator must not forget, in one SQLite file and one unit of work, and the traffic that it records."""
