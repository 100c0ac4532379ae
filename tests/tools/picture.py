"""Takes the picture of the page that the README shows, while a slice is broken in the demo: light, and dark.

python -m tests.tools.picture examples/demo/page.png examples/demo/page-dark.png [--weights FILE]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tools import debian
from tests.tools.chromium import Chromium

FIRING = "webhook, signature verified: firing"
SETTLED = 8.0
"""Seconds from the webhook until the route shows in the traffic."""
WIDTH, HEIGHT = 1200, 900


def main(light: Path, dark: Path, *options: str) -> None:
    command = [sys.executable, "-m", "examples.demo", *options]
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo,
    ):
        browser = Chromium(debian.command("chromium"), Path(profile))
        try:
            assert demo.stdout is not None
            api, taken = "", False
            for line in demo.stdout:
                print(line, end="")
                found = re.search(r"live: (http://\S+)", line)
                api = found[1] if found else api
                if FIRING in line and not taken:
                    taken = True
                    time.sleep(SETTLED)
                    for path in (light, dark):
                        browser.open(api, width=WIDTH, height=HEIGHT, dark=path is dark)
                        browser.wait("document.querySelector('.incident .actions-taken')")
                        time.sleep(1.0)
                        browser.screenshot(path)
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
