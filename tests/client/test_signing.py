import base64
import hashlib
import hmac
import json
import re
import textwrap
import time
from datetime import UTC, datetime

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kc_otel.client import webhooks
from kc_otel.client.webhooks import Secret, new_secret, sign, verify

NOW = 1_700_000_000.0
KEY = base64.b64encode(bytes(range(32))).decode()
SECRET = Secret.parse("whsec_" + KEY)
BODY = b'{"status":"firing"}'


def headers(**changes):
    return sign([SECRET], "msg_1", BODY, now=NOW) | {name.replace("_", "-"): value for name, value in changes.items()}


@given(body=st.dictionaries(st.text(), st.text() | st.integers() | st.none()), key=st.binary(min_size=24, max_size=64))
def test_the_reference_library_accepts_what_we_sign(body, key):
    text = "whsec_" + base64.b64encode(key).decode()
    raw = json.dumps(body, ensure_ascii=False).encode()
    signed = sign([Secret.parse(text)], "msg_abc", raw, now=datetime.now(UTC).timestamp())
    assert standardwebhooks.Webhook(text).verify(raw, signed) == body


@given(body=st.dictionaries(st.text(), st.text() | st.integers() | st.none()), key=st.binary(min_size=24, max_size=64))
def test_we_accept_what_the_reference_library_signs(body, key):
    text = "whsec_" + base64.b64encode(key).decode()
    raw = json.dumps(body)
    at = datetime.fromtimestamp(NOW, UTC)
    signature = standardwebhooks.Webhook(text).sign("msg_abc", at, raw)
    given_headers = {"Webhook-Id": "msg_abc", "Webhook-Timestamp": str(int(NOW)), "Webhook-Signature": signature}
    assert verify(text, given_headers, raw, now=NOW) == body


def test_rotation_signs_with_both_and_accepts_either():
    old, new = new_secret(), new_secret()
    signed = sign([Secret.parse(new), Secret.parse(old)], "msg_1", BODY, now=NOW)
    for known in (old, new, [new_secret(), old]):
        assert verify(known, signed, BODY, now=NOW) == {"status": "firing"}
    standardwebhooks.Webhook(old).verify(BODY, sign([Secret.parse(new), Secret.parse(old)], "m", BODY, now=time.time()))


@given(position=st.integers(0, len(BODY) - 1), bit=st.integers(0, 7))
def test_one_changed_bit_is_refused(position, bit):
    forged = bytearray(BODY)
    forged[position] ^= 1 << bit
    with pytest.raises(webhooks.VerificationError, match="no signature matches"):
        verify(SECRET, headers(), bytes(forged), now=NOW)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"webhook_id": ""}, "header webhook-id is missing"),
        ({"webhook_timestamp": "soon"}, "is not a unix time"),
        ({"webhook_timestamp": "-5"}, "is not a unix time"),
        ({"webhook_timestamp": "1700000001"}, "no signature matches"),
        ({"webhook_id": "msg_2"}, "no signature matches"),
        ({"webhook_signature": "v1,"}, "no signature matches"),
        ({"webhook_signature": "v1a,AAAA v2,BBBB nonsense"}, "no signature matches"),
        ({"webhook_signature": "v1,\u00e9"}, "no signature matches"),
    ],
)
def test_tampered_headers_are_refused(changes, said):
    with pytest.raises(webhooks.VerificationError, match=said):
        verify(SECRET, headers(**changes), BODY, now=NOW)


@pytest.mark.parametrize(("sign", "said"), [(1, "301 s too old"), (-1, "301 s too new")])
def test_old_and_future_attempts_are_refused(sign, said):
    verify(SECRET, headers(), BODY, now=NOW + sign * 300)
    with pytest.raises(webhooks.VerificationError, match=said):
        verify(SECRET, headers(), BODY, now=NOW + sign * 301)


@pytest.mark.parametrize("text", ["whsec_!!!", "whsec_" + base64.b64encode(b"short").decode(), ""])
def test_bad_secret_is_named_without_being_shown(text):
    with pytest.raises(webhooks.SecretError) as error:
        Secret.parse(text)
    assert not text or text.removeprefix("whsec_") not in str(error.value)


def test_secret_shows_in_no_repr():
    assert KEY not in repr(SECRET)
    assert repr(SECRET.key) not in repr([SECRET])


def test_a_signature_is_of_the_version_it_says_in_plain_base64_and_among_the_first():
    right = headers()["webhook-signature"]
    signature = right.removeprefix("v1,")
    assert verify(SECRET, headers(webhook_signature=" ".join(["v1,AAAA"] * 31 + [right])), BODY, now=NOW)
    for wrong in (
        f"v2,{signature}",
        signature,
        f"v1,{signature[:9]}!{signature[9:]}",
        " ".join(["v1,AAAA"] * 32 + [right]),
    ):
        with pytest.raises(webhooks.VerificationError, match="no signature matches"):
            verify(SECRET, headers(webhook_signature=wrong), BODY, now=NOW)


def test_no_secret_at_all_is_an_error():
    with pytest.raises(webhooks.SecretError):
        sign([], "msg_1", BODY, now=NOW)
    with pytest.raises(webhooks.SecretError):
        verify([], headers(), BODY, now=NOW)


def test_message_id_cannot_smuggle_a_dot():
    with pytest.raises(ValueError, match="message id"):
        sign([SECRET], "msg.1", BODY, now=NOW)


DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("message_id", "raw", "said"),
    [
        ("msg_1", DEEP, "is not JSON"),
        ("msg_1", b"9" * 5000, "is not JSON"),
        ("msg_1", b"\xff\xfe", "is not JSON"),
        ("msg_\ud800", BODY, "webhook-id has characters"),
        ("msg\n1", BODY, "webhook-id has characters"),
    ],
)
def test_nothing_that_is_sent_raises_what_is_not_documented(message_id, raw, said):
    digest = hmac.new(SECRET.key, f"{message_id}.{int(NOW)}.".encode(errors="surrogatepass") + raw, hashlib.sha256)
    given_headers = {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(NOW)),
        "webhook-signature": "v1," + base64.b64encode(digest.digest()).decode(),
    }
    with pytest.raises(webhooks.VerificationError, match=said):
        verify(SECRET, given_headers, raw, now=NOW)


def test_a_body_that_no_request_can_carry_is_refused():
    with pytest.raises(webhooks.VerificationError, match="as received"):
        verify(SECRET, headers(), "\ud800", now=NOW)


@given(
    names=st.dictionaries(st.sampled_from(["webhook-id", "webhook-timestamp", "webhook-signature"]), st.text()),
    raw=st.binary() | st.text(),
)
def test_any_headers_and_body_are_verified_or_refused(names, raw):
    with pytest.raises(webhooks.VerificationError):
        verify(SECRET, names, raw, now=NOW)


def test_the_receiver_in_the_documentation_works():
    blocks = re.findall(r"(?:^    .*\n|^\n)+", webhooks.__doc__, re.MULTILINE)
    source = textwrap.dedent(next(block for block in blocks if "Starlette" in block))
    handled = []
    space = {"SECRET": new_secret(), "handle": handled.append}
    exec(compile(source, "docstring", "exec"), space)
    client = TestClient(space["app"])
    for secret, status in ((space["SECRET"], 204), (new_secret(), 401)):
        signed = sign([Secret.parse(secret)], "msg_1", BODY, now=time.time())
        assert client.post("/alerts", content=BODY, headers=signed).status_code == status
    assert handled == [{"status": "firing"}]
