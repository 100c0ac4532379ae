"""Webhooks out: endpoints, a durable outbox, delivery, and a file for each format."""

from kc_otel._extras import require

require("serve", "the evaluator", "httpx")
