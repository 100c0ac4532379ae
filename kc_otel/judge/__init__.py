"""Streams, verdicts, incidents, policy, decisions and promotion: pure, without input or output."""
