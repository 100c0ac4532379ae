"""Health check of a local evaluator, with or without TLS: `python -m kc_otel.client.alive [HOST:PORT [PATH]]`.

Exits with 0 or 1. It is meant for containers, which do not know if the ports speak TLS or for which name the
certificate was issued, and have no certificate of their own. Nothing secret is sent, so nothing is verified: another
program that answers on this machine's loopback would only be reported as alive. It uses the standard library only,
because it runs every few seconds.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from typing import Final

__all__ = ["alive"]

_TIMEOUT_SECONDS: Final = 2.0


def alive(address: str = "127.0.0.1:4320", path: str = "/healthz") -> bool:
    """Return True if an evaluator answers.

    Args:
        address: Host and port of its API.
        path: /healthz to ask if it is up, /readyz to ask if it judges.
    """
    host, _, port = address.rpartition(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_SECONDS)
    if _answers(plain, path):
        return True
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    secured = http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT_SECONDS, context=context)
    try:
        secured.connect()
    except OSError:
        return False
    # With mutual TLS it hangs up now, for want of a certificate; it was there to shake hands.
    return _answers(secured, path, hung_up=True)


def _answers(connection: http.client.HTTPConnection, path: str, *, hung_up: bool = False) -> bool:
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return hung_up
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not alive(*sys.argv[1:3]))
