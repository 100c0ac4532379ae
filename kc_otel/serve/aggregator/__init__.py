"""One stream a host: what many recorders send is added up before it leaves the machine."""

from kc_otel._extras import require

require("serve", "the aggregator", "fastapi", "httpx", "uvicorn")
