"""The policy Pi as a pure function of verdicts, and the durable outbox of webhooks."""
