"""Webhooks out: a durable outbox, endpoints, formats, delivery."""
