"""Webhooks out: endpoints, a durable outbox, delivery, and a file for each format."""
