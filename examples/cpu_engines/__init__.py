"""Engines of a CPU with integer weights, held to a float32 checkpoint by a gate: `python -m examples.cpu_engines`."""
