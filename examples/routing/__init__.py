"""Two vLLM engines behind a proxy, and a slice that a contract moves between them: `python -m examples.routing`."""
