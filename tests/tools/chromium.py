"""Drives a Chromium through its DevTools protocol over a pair of pipes: no port, no websocket, nothing to install."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
)


class PageError(Exception):
    """The page or the browser did not do what was asked of it."""


class Chromium:
    """A headless browser with one page; `command` is the program, `profile` an empty folder for its files."""

    def __init__(self, command: Sequence[str], profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        # The protocol's pipes are descriptors 3 and 4 of the browser; a shell puts them there.
        place = 'from=$0; to=$1; shift; exec "$@" 3</proc/self/fd/$from 4>/proc/self/fd/$to'
        self.process = subprocess.Popen(
            [
                *("sh", "-c", place, str(to_browser), str(from_browser)),
                *(*command, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = next(info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; what happens meanwhile goes to `events`."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank' && document.readyState === 'complete'")
        self.events.clear()  # what is said from here on is about the new page
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.evaluate(f"Boolean({expression})"):
                return
            time.sleep(0.1)
        text = self.evaluate("document.body ? document.body.innerText.slice(0, 2000) : ''")
        raise PageError(f"after {seconds:g} s not yet: {expression}\nThe page says: {text}\n{self.complaints()}")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """What is visible, or the whole page, as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, refused resources and uncaught exceptions since the page was opened."""
        self.evaluate("1")
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning", "assert"}:
                found.append(" ".join(str(part.get("value", part.get("description"))) for part in parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def accessible(self) -> list[tuple[str, str]]:
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)

    def _read(self) -> dict[str, Any]:
        while True:
            while b"\0" not in self._buffer:
                chunk = os.read(self._in, 1 << 20)
                if not chunk:
                    raise PageError("the browser has ended")
                self._buffer += chunk
            line, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(line)
            if "method" not in message:
                return message
            self.events.append(message)
