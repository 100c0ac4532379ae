"""The HTTP API: a file of routes for each subject, and the shapes of what they answer."""

from kc_otel._extras import require

require("serve", "the evaluator", "fastapi", "starlette")
