"""Judging what was recorded: the gate with its evidence, replay, compare-log, operators."""
