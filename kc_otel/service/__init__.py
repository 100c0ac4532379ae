"""The evaluator process: every box wired together, its API and its state."""
