"""Webhooks out: endpoints and their formats, a durable outbox, delivery."""

from kc_otel._extras import require

require("serve", "the evaluator", "httpx")
