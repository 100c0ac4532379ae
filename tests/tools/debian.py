"""Fetches programs that tests run, such as Prometheus and Chromium, from Debian's archive into a folder.

Nothing on the system changes: apt runs with its own lists, cache and status, and packages are unpacked, not
installed. Where the archive is comes from the machine's own apt configuration; newer versions than the machine's
release are asked for first (suite sid), the machine's own suite second.

    python tests/tools/debian.py            # prints where each program is, and what it does to get there
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

APT = Path("/etc/apt")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "debian-tools"
SUITES = ("sid", "")
TIMEOUT = 300.0
LEFT_OUT = ("libc6", "libllvm", "libgl1-mesa-dri", "libz3", "debconf", "x11-")
"""Packages that come along and are not needed: the machine's libc goes with its loader, and no GPU is driven."""
_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<rest>.*)")
_UNREACHABLE: dict[Path, str] = {}


@dataclass(frozen=True)
class Tool:
    """A program: the packages that may hold it, in the order of trying, and its place in them."""

    packages: tuple[str, ...]
    place: str
    libraries: bool = False
    """Whether it needs the shared libraries of the packages that its package depends on; then the machine's own suite
    is the only one, for newer libraries need a newer libc."""


TOOLS = {
    "prometheus": Tool(("prometheus",), "usr/bin/prometheus"),
    "promtool": Tool(("promtool", "prometheus"), "usr/bin/promtool"),
    "amtool": Tool(("prometheus-alertmanager",), "usr/bin/amtool"),
    "alertmanager": Tool(("prometheus-alertmanager",), "usr/bin/prometheus-alertmanager"),
    "victoria-metrics": Tool(("victoria-metrics",), "usr/bin/victoria-metrics"),
    "vmalert": Tool(("victoria-metrics",), "usr/bin/vmalert"),
    "chromium": Tool(("chromium-headless-shell",), "usr/lib/chromium/chromium-headless-shell", libraries=True),
    "docker-compose": Tool(("docker-compose",), "usr/libexec/docker/cli-plugins/docker-compose"),
}


class UnavailableError(Exception):
    """A program cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Source:
    uri: str
    suite: str
    signed_by: str

    def stanza(self, suite: str) -> str:
        """The source in apt's deb822 form, for `suite` or for its own."""
        signed = f"Signed-By: {self.signed_by}\n" if self.signed_by else ""
        return f"Types: deb\nURIs: {self.uri}\nSuites: {suite or self.suite}\nComponents: main\n{signed}"


def find(name: str, cache: Path = CACHE, say: Callable[[str], None] = lambda _: None) -> Path:
    return Path(command(name, cache, say)[-1])


def command(name: str, cache: Path = CACHE, say: Callable[[str], None] = lambda _: None) -> tuple[str, ...]:
    tool, reasons = TOOLS[name], []
    for suite in ("",) if tool.libraries else SUITES:
        for package in tool.packages:
            root = cache / (suite or "own")
            try:
                fetch(package, root, suite, say, libraries=tool.libraries)
                found = (str(root / package / tool.place),)
                if tool.libraries:
                    found = ("env", f"LD_LIBRARY_PATH={_library_path(root / package)}", *found)
                _run((*found, "--version"), cwd=cache)
            except UnavailableError as error:
                reasons.append(f"{suite or 'own suite'}: {error}")
            else:
                return found
    raise UnavailableError(f"{name} cannot be had: {'; '.join(reasons)}")


def alertmanager(cache: Path = CACHE, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """How to start Alertmanager: Debian's build reads its default template from a fixed path of the system.

    The package's own files are put there in a mount namespace of the process.
    """
    binary = find("alertmanager", cache, say)
    share = binary.parents[1] / "share"
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"']
    tried = subprocess.run([*prefix, str(share), "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise UnavailableError(f"Alertmanager's template cannot be put in place: {tried.stderr.strip()}")
    return [*prefix, str(share), str(binary)]


def _library_path(root: Path) -> str:
    folders = [folder for lib in ("usr/lib", "lib") for folder in sorted(root.glob(f"{lib}/*-linux-gnu*"))]
    return ":".join(str(path) for folder in folders for path in (folder, folder / "pulseaudio") if path.exists())


def fetch(package: str, root: Path, suite: str, say: Callable[[str], None], *, libraries: bool = False) -> None:
    """Download one package, or with it all that it depends on, and unpack it into `root/package`.

    A second call finds it there.
    """
    target = root / package
    if target.exists():
        return
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise UnavailableError("apt-get and dpkg are needed; this is no Debian")
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run beside each other, and apt has one set of lists
        if target.exists():
            return
        known = (root / "apt.conf").exists()
        try:
            _download(package, root, suite, say, libraries)
        except UnavailableError:
            if not known:
                raise
            say("the package lists may be old; reading them again")
            (root / "apt.conf").unlink()
            _download(package, root, suite, say, libraries)


def _download(package: str, root: Path, suite: str, say: Callable[[str], None], libraries: bool) -> None:
    target, conf = root / package, _prepare(root, suite, say)
    names = _with_libraries(package, conf) if libraries else (package,)
    with tempfile.TemporaryDirectory(dir=root) as work:
        say(f"downloading {package} from {suite or 'the own suite'}")
        _run(("apt-get", "-qq", "-c", str(conf), "download", *names), cwd=Path(work))
        unpacked = Path(work) / "unpacked"
        for archive in sorted(Path(work).glob("*.deb")):
            _run(("dpkg", "-x", str(archive), str(unpacked)), cwd=Path(work))
        if not unpacked.exists():
            raise UnavailableError(f"apt-get downloaded nothing for {package}")
        if not target.exists():
            unpacked.rename(target)
        say(f"unpacked {package} into {target}")


def _with_libraries(package: str, conf: Path) -> tuple[str, ...]:
    """Everything that would be installed with a package on an empty machine, without what every machine has."""
    plan = _run(
        ("apt-get", "-c", str(conf), "install", "--simulate", "--no-install-recommends", "--yes", package), conf.parent
    )
    names = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    return tuple(name for name in names if not name.startswith(LEFT_OUT))


def machine_source(apt: Path = APT) -> Source:
    """The machine's own archive: the first one that is not for security updates."""
    found = next(iter(_sources(apt)), None)
    if found is None:
        raise UnavailableError(f"no archive with component main is configured below {apt}")
    return found


def _sources(apt: Path) -> Iterator[Source]:
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for paragraph in re.split(r"\n\s*\n", path.read_text()):
            lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
            fields = {
                key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines if ":" in line)
            }
            if fields.get("enabled", "yes") == "no" or "deb" not in fields.get("types", "").split():
                continue
            uri, suite = (fields.get(key, "").split() or [""] for key in ("uris", "suites"))
            if "main" in fields.get("components", "").split() and _is_archive(uri[0], suite[0]):
                yield Source(uri[0], suite[0], fields.get("signed-by", ""))
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))):
        for line in path.read_text().splitlines() if path.exists() else ():
            match = _LINE.fullmatch(line)
            if match and "main" in match["rest"].split() and _is_archive(match["uri"], match["suite"]):
                signed = re.search(r"signed-by=(\S+)", match["options"] or "")
                yield Source(match["uri"], match["suite"], signed[1] if signed else "")


def _is_archive(uri: str, suite: str) -> bool:
    return bool(uri) and "security" not in suite and "security" not in uri and not suite.endswith("/")


def _prepare(root: Path, suite: str, say: Callable[[str], None]) -> Path:
    """Own apt configuration below `root`, with fresh lists; returns its path."""
    conf = root / "apt.conf"
    if conf.exists():
        return conf
    if root in _UNREACHABLE:
        raise UnavailableError(_UNREACHABLE[root])
    source = machine_source()
    own = root / "apt"
    for folder in ("sources", "lists/partial", "cache/archives/partial"):
        (own / folder).mkdir(parents=True, exist_ok=True)
    (own / "sources" / "archive.sources").write_text(source.stanza(suite))
    (own / "status").write_text("")
    settings = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": own / "sources",
        "Dir::State::lists": own / "lists",
        "Dir::State::status": own / "status",
        "Dir::Cache": own / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Retries": 2,
        "Acquire::http::Timeout": 20,
        "Acquire::Languages": "none",
    }
    # A container's apt empties the system's cache after every update; these lists are none of its business.
    quiet = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")
    text = "".join(f"#clear {name};\n" for name in quiet)
    draft = own / "apt.conf"
    draft.write_text(text + "".join(f'{name} "{value}";\n' for name, value in settings.items()))
    say(f"reading the package lists of {suite or source.suite}")
    try:
        _run(("apt-get", "-qq", "-c", str(draft), "update", "--error-on=any"), cwd=root)
    except UnavailableError as error:
        _UNREACHABLE[root] = str(error)
        raise
    draft.replace(conf)
    return conf


def _run(command: tuple[str, ...], cwd: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except FileNotFoundError:
        raise UnavailableError(f"there is no {command[0]}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[0]} took more than {TIMEOUT:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()
        raise UnavailableError(f"{' '.join(command[:1])} failed: {' '.join(lines[:2]) or done.returncode}")
    return done.stdout


def main() -> int:
    missing = 0
    for name in sys.argv[1:] or TOOLS:
        try:
            print(f"{name}: {find(name, say=print)}")
        except UnavailableError as error:
            missing += 1
            print(error, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
