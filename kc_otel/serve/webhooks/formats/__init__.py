"""Bodies in the formats that other receivers read, each a pure function of the one that is stored in the outbox."""

from kc_otel.serve.webhooks.formats.render import Format, Outgoing, render

__all__ = ["Format", "Outgoing", "render"]
