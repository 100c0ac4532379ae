"""Fetches programs that tests run, such as Prometheus and Chromium, from Debian's archive into a folder.

Nothing on the system changes: apt runs with its own lists, cache and status, and packages are unpacked, not
installed. The archive is the machine's own; newer versions than the machine's release are asked for first (suite sid),
the machine's own suite second.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "debian-tools"
SUITES = ("sid", "")
TIMEOUT = 300.0
LEFT_OUT = ("libc6", "libllvm", "libgl1-mesa-dri", "libz3", "debconf", "x11-")
"""Packages that come along and are not needed: the machine's libc goes with its loader, and no GPU is driven."""
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


def find(name: str) -> Path:
    return Path(command(name)[-1])


def command(name: str) -> tuple[str, ...]:
    tool, reasons = TOOLS[name], []
    for suite in ("",) if tool.libraries else SUITES:
        for package in tool.packages:
            root = CACHE / (suite or "own")
            try:
                _fetch(package, root, suite, libraries=tool.libraries)
                found = (str(root / package / tool.place),)
                if tool.libraries:
                    found = ("env", f"LD_LIBRARY_PATH={_library_path(root / package)}", *found)
                _run((*found, "--version"), cwd=CACHE)
            except UnavailableError as error:
                reasons.append(f"{suite or 'own suite'}: {error}")
            else:
                return found
    raise UnavailableError(f"{name} cannot be had: {'; '.join(reasons)}")


def alertmanager() -> list[str]:
    """How to start Alertmanager: Debian's build reads its default template from a fixed path of the system.

    The package's own files are put there in a mount namespace of the process.
    """
    binary = find("alertmanager")
    share = binary.parents[1] / "share"
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"']
    tried = subprocess.run([*prefix, str(share), "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise UnavailableError(f"Alertmanager's template cannot be put in place: {tried.stderr.strip()}")
    return [*prefix, str(share), str(binary)]


def _library_path(root: Path) -> str:
    folders = [folder for lib in ("usr/lib", "lib") for folder in sorted(root.glob(f"{lib}/*-linux-gnu*"))]
    return ":".join(str(path) for folder in folders for path in (folder, folder / "pulseaudio") if path.exists())


def _fetch(package: str, root: Path, suite: str, *, libraries: bool) -> None:
    """Download one package, or with it all that it depends on, and unpack it into `root/package`; once."""
    if (root / package).exists():
        return
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise UnavailableError("apt-get and dpkg are needed; this is no Debian")
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run beside each other, and apt has one set of lists
        known = (root / "apt.conf").exists()
        try:
            _download(package, root, suite, libraries)
        except UnavailableError:
            if not known:
                raise
            (root / "apt.conf").unlink()  # its lists may be old
            _download(package, root, suite, libraries)


def _download(package: str, root: Path, suite: str, libraries: bool) -> None:
    if (root / package).exists():
        return
    conf = _prepare(root, suite)
    names = _with_libraries(package, conf) if libraries else (package,)
    with tempfile.TemporaryDirectory(dir=root) as work:
        print(f"downloading {package} from {suite or 'the own suite'}")
        _run(("apt-get", "-qq", "-c", str(conf), "download", *names), cwd=Path(work))
        unpacked = Path(work) / "unpacked"
        for archive in sorted(Path(work).glob("*.deb")):
            _run(("dpkg", "-x", str(archive), str(unpacked)), cwd=Path(work))
        if not unpacked.exists():
            raise UnavailableError(f"apt-get downloaded nothing for {package}")
        unpacked.rename(root / package)


def _with_libraries(package: str, conf: Path) -> tuple[str, ...]:
    """Everything that would be installed with a package on an empty machine, without what every machine has."""
    plan = _run(
        ("apt-get", "-c", str(conf), "install", "--simulate", "--no-install-recommends", "--yes", package), conf.parent
    )
    names = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    return tuple(name for name in names if not name.startswith(LEFT_OUT))


@cache
def _archive() -> tuple[str, str, str]:
    """Address, suite and key of the machine's own archive: the first one that is not for security updates."""
    asked = ("--format", "$(REPO_URI) $(RELEASE) $(SIGNED_BY)", "Created-By: Packages", "Component: main")
    for line in _run(("apt-get", "indextargets", *asked), Path("/")).splitlines():
        uri, suite, key = line.split(" ", 2)
        if "security" not in f"{uri} {suite}":
            return uri, suite, "" if key.startswith("$") else key
    raise UnavailableError("apt has no archive with component main")


def _prepare(root: Path, suite: str) -> Path:
    """Own apt configuration below `root`, with fresh lists; returns its path."""
    conf = root / "apt.conf"
    if conf.exists():
        return conf
    if root in _UNREACHABLE:
        raise UnavailableError(_UNREACHABLE[root])
    own = root / "apt"
    for folder in ("sources", "lists/partial", "cache/archives/partial"):
        (own / folder).mkdir(parents=True, exist_ok=True)
    uri, release, key = _archive()
    signed = f"Signed-By: {key}\n" if key else ""
    source = f"Types: deb\nURIs: {uri}\nSuites: {suite or release}\nComponents: main\n{signed}"
    (own / "sources" / "archive.sources").write_text(source)
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
