"""TLS and mutual TLS with real handshakes on every port, and certificates that are replaced while it runs."""

import asyncio
import contextlib
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from kc_otel.client.router import Router
from kc_otel.serve.access.tls import Tls
from kc_otel.serve.watched_files import UnusableFileError
from tests.integration.conftest import CONTRACT, Evaluator
from tests.tools.load import EXPORT
from tests.tools.waiting import eventually

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


class Authority:
    """Signs certificates; `ca` is its own, `issue` those of others."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.ca, self._key = folder, name, folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
        usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]  # Python 3.13 asks authorities for it
        made = ["-days", "2", "-subj", f"/CN={name}", *usage, "-out", str(self.ca)]
        self._run("req", "-x509", *self._new(self._key), *made)

    def issue(self, who: str) -> tuple[Path, Path]:
        paths = [self.folder / f"{self.name}-{who}.{kind}" for kind in ("pem", "key", "csr", "ext")]
        certificate, key, request, extensions = paths
        extensions.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        self._run("req", *self._new(key), "-subj", f"/CN={who}", "-out", str(request))
        self._run(
            *("x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self._key), "-days", "2"),
            *("-CAcreateserial", "-extfile", str(extensions), "-out", str(certificate)),
        )
        return certificate, key

    @staticmethod
    def _new(key: Path) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)]

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture
def start(tmp_path):
    """Starts an evaluator with what one authority issued, asking for certificates of another where that is given."""
    started = []
    (tmp_path / "policy.yaml").write_text(CONTRACT)

    def make(authority, clients=None):
        for source, target in zip(authority.issue("evaluator"), ("cert.pem", "key.pem"), strict=True):
            shutil.copy(source, tmp_path / target)
        options = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
        if clients is not None:
            shutil.copy(clients.ca, tmp_path / "clients.pem")
            options += ["--tls-client-ca", str(tmp_path / "clients.pem")]
        started.append(Evaluator(tmp_path / "policy.yaml", tmp_path / "state", {}, "--no-webhooks", *options))
        return started[-1]

    yield make
    for evaluator in started:
        if evaluator.process.poll() is None:
            evaluator.stop()


def answers(evaluator, authority, mine=None):
    """Which of the three ports let somebody in who trusts an authority and shows a certificate."""
    context = ssl.create_default_context(cafile=authority.ca)
    if mine is not None:
        context.load_cert_chain(*mine)
    found = set()
    for name, url in (("api", f"{evaluator.api}/healthz"), ("http", f"{evaluator.http}/v1/metrics")):
        try:
            httpx.request("GET", url, verify=context, timeout=5)
            found.add(name)
        except httpx.TransportError:
            pass
    certificate, key = (None, None) if mine is None else (path.read_bytes() for path in mine)
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), key, certificate)
    with grpc.secure_channel(evaluator.grpc, credentials) as channel:
        try:
            channel.unary_unary(EXPORT)(b"", timeout=5)
            found.add("grpc")
        except grpc.RpcError:
            pass
    return found


ALL = {"api", "http", "grpc"}


@pytest.mark.slow
def test_every_port_speaks_tls_and_nothing_else(start, tmp_path, monkeypatch):
    """Who does not trust the authority, or does not speak TLS, gets nothing; a router trusts the system's."""
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    evaluator = start(ours)
    assert evaluator.api.startswith("https://")
    assert answers(evaluator, ours) == ALL
    assert answers(evaluator, others) == set()
    with pytest.raises(httpx.TransportError):
        httpx.get(evaluator.api.replace("https", "http") + "/healthz", timeout=5)
    with grpc.insecure_channel(evaluator.grpc) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(EXPORT)(b"", timeout=3)
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.ca))
    with Router(evaluator.api, wait=0.1) as router:
        assert router.wait_for_table(10)


@pytest.mark.slow
def test_mutual_tls_lets_in_who_has_a_certificate(start, tmp_path, monkeypatch):
    """On every port; none, or another authority's, does not do. A router shows the one that the environment names."""
    ours, clients = Authority(tmp_path, "ours"), Authority(tmp_path, "clients")
    evaluator = start(ours, clients)
    mine, forged = clients.issue("trainer"), ours.issue("trainer")
    assert answers(evaluator, ours) == set()
    assert answers(evaluator, ours, forged) == set()
    assert answers(evaluator, ours, mine) == ALL
    for name, value in zip(("SSL_CERT_FILE", "KC_OTEL_CLIENT_CERTIFICATE", "KC_OTEL_CLIENT_KEY"), (ours.ca, *mine),
                           strict=True):  # fmt: skip
        monkeypatch.setenv(name, str(value))
    with Router(evaluator.api, wait=0.1) as router:
        assert router.wait_for_table(10)


@pytest.mark.slow
@pytest.mark.parametrize("protection", ["none", "TLS", "mutual TLS"])
def test_a_health_check_needs_to_know_nothing(tmp_path, start, protection):
    """Neither whether there is TLS, nor a name or a certificate; an evaluator that has stopped is not alive."""
    ours = Authority(tmp_path, "ours")
    if protection == "none":
        evaluator = Evaluator(tmp_path / "policy.yaml", tmp_path / "state", {}, "--no-webhooks")
    else:
        evaluator = start(ours, ours if protection == "mutual TLS" else None)
    address = evaluator.api.partition("://")[2]
    check = [sys.executable, "-m", "kc_otel.client.alive", address]
    try:
        assert subprocess.run(check, check=False).returncode == 0
        evaluator.process.send_signal(signal.SIGSTOP)  # the system still takes connections
        assert subprocess.run(check, check=False).returncode == 1
    finally:
        evaluator.process.send_signal(signal.SIGCONT)
        evaluator.stop()
    assert subprocess.run(check, check=False).returncode == 1


@pytest.mark.slow
def test_certificates_and_authorities_are_replaced_while_it_runs(start, tmp_path):
    """Within a tick every port shows the new certificate, and takes certificates of the new authority only."""
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    before, after = old.issue("trainer"), new.issue("trainer")
    evaluator = start(first, old)
    assert answers(evaluator, first, before) == ALL
    certificate, key = second.issue("evaluator")
    for source, target in ((new.ca, "clients.pem"), (certificate, "cert.pem"), (key, "key.pem")):
        shutil.copy(source, tmp_path / "next")
        (tmp_path / "next").replace(tmp_path / target)
    eventually(lambda: answers(evaluator, second, after) == ALL, 10.0, otherwise=lambda: evaluator.log)
    assert answers(evaluator, second, before) == set()
    assert answers(evaluator, first, after) == set()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_nobody_resumes_a_session_past_the_authority_that_let_them_in(tmp_path, version):
    """A session is resumed without its certificate: one of an authority that has been taken away is none any more."""
    ours, old, new = (Authority(tmp_path, name) for name in ("ours", "old", "new"))
    authority = tmp_path / "clients.pem"
    shutil.copy(old.ca, authority)
    tls = Tls(*ours.issue("evaluator"), authority)
    mine = ssl.create_default_context(cafile=ours.ca)
    mine.minimum_version = mine.maximum_version = version
    mine.load_cert_chain(*old.issue("trainer"))

    async def echo(reader, writer):
        writer.write(await reader.read(10))
        writer.close()

    def asked(port, session=None):
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            mine.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secured,
        ):
            secured.sendall(b"hello")
            return secured.recv(10), secured.session, secured.session_reused

    async def rotated():
        async with await asyncio.start_server(echo, "127.0.0.1", 0, ssl=tls.listening) as server:
            port = server.sockets[0].getsockname()[1]
            _, session, _ = await asyncio.to_thread(asked, port)
            said, _, reused = await asyncio.to_thread(asked, port, session)
            assert (said, reused) == (b"hello", True)
            shutil.copy(new.ca, tmp_path / "next")
            (tmp_path / "next").replace(authority)
            tls.renew()
            try:
                return (await asyncio.to_thread(asked, port, session))[0]
            except (ssl.SSLError, ConnectionError):
                return b""

    assert asyncio.run(rotated()) == b""


def test_what_cannot_be_used_is_said_and_changes_nothing(tmp_path, caplog):
    """At the start it is an error that names the file; later, what was in force still is."""
    ours = Authority(tmp_path, "ours")
    certificate, key = ours.issue("evaluator")
    with pytest.raises(UnusableFileError, match=f"{certificate} and {ours.ca}"):
        Tls(certificate, ours.ca)
    with pytest.raises(UnusableFileError, match="no-such-file: cannot be read"):
        Tls(certificate, tmp_path / "no-such-file")
    with pytest.raises(UnusableFileError, match="Is a directory"):
        Tls(certificate, key, tmp_path)
    with pytest.raises(UnusableFileError, match="no certificates of authorities"):
        Tls(certificate, key, key)
    tls = Tls(certificate, key)
    key.write_text("half a k")
    tls.renew()
    tls.renew()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "what was read before stays in force" in caplog.text
    assert "half a k" not in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own count of memory")
def test_an_idle_connection_takes_little_memory(start, tmp_path):
    """Hundreds have begun to say something and go no further: what asyncio keeps for each is what TLS costs."""
    ours = Authority(tmp_path, "ours")
    evaluator = start(ours)
    context = ssl.create_default_context(cafile=ours.ca)
    host, port = evaluator.http.removeprefix("https://").split(":")

    def resident():
        pages = Path(f"/proc/{evaluator.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    with contextlib.ExitStack() as stack:

        def connect(number):
            for _ in range(number):
                connection = context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host)
                stack.enter_context(connection).sendall(b"POST /v1/metrics HTTP/1.1\r\n")

        connect(100)
        before = resident()
        connect(400)
        assert (resident() - before) / 400 < 100 * 1024
