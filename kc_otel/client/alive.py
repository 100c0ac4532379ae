"""Whether an evaluator beside us is up, with TLS or without: `python -m kc_otel.client.alive [HOST:PORT [PATH]]`.

Exits with 0 or 1. For health checks of containers, which know neither whether the ports speak TLS, nor a name that the
certificate is for, nor have a certificate of their own. Nothing secret is sent, so nothing is verified: whoever else
answered on this machine's loopback would only be called alive. Standard library only, for it runs every few seconds.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from typing import Final

__all__ = ["alive"]

_PATIENCE: Final = 2.0
_USUAL: Final = "127.0.0.1:4320"


def alive(address: str = _USUAL, path: str = "/healthz") -> bool:
    """Whether an evaluator answers.

    Args:
        address: Host and port of its API.
        path: What is asked: /healthz whether it is up, /readyz whether it judges.
    """
    host, _, port = address.rpartition(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=_PATIENCE)
    if _answers(plain, path):
        return True
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    secured = http.client.HTTPSConnection(host, int(port), timeout=_PATIENCE, context=context)
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
