"""From streams to verdicts, incidents, policy, decisions and promotion: pure, no input or output."""
