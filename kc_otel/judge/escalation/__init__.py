"""The escalation policy Pi: alerts from verdicts, who is told of them and when, what people decide, webhook bodies."""
