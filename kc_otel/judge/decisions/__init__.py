"""The decision table: which kernel serves a slice, and what else a firing contract asks of everyone."""
