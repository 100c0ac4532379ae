"""The evaluator process: OTLP in, state, API, page and webhooks. Needs the extra `serve`."""
