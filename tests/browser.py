"""A real browser, driven over Chromium's DevTools protocol: what a page shows, and what a user does with it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.polling import PATIENCE, until

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += (
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}


class Page:
    """A page of a browser. `faults` are errors of its scripts, and what its policy or the network refused."""

    def __init__(self, sent: int, received: int) -> None:
        self._sent, self._received = sent, received
        self._numbers, self._rest = itertools.count(1), b""
        self._session: str | None = None
        self.faults: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)
        until(lambda: self.value("document.readyState") == "complete" and self.value("location.href") == url, url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        done = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of the first element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def type(self, selector: str, text: str) -> None:
        """Type into a field, whatever it held."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus(); document.activeElement.select?.()")
        self._ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._ask("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Show the page on a screen of this size, light or dark."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Write what is to be seen as PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._sent, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                return said["result"]
            if said.get("method") == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.faults.append(said["params"]["entry"]["text"])

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            read = os.read(self._received, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A page of a new Chromium whose profile is in the folder; the test is skipped where there is none."""
    if (program := shutil.which("chromium")) is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    commands, answers = os.pipe(), os.pipe()
    theirs, ours = (commands[0], answers[1]), (commands[1], answers[0])
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(  # Chromium reads file descriptor 3 and writes 4
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}',
                "bash",
                program,
                *FLAGS,
                f"--user-data-dir={folder}",
            ],
            pass_fds=theirs,
            stdout=log,
            stderr=log,
        )
    for descriptor in theirs:
        os.close(descriptor)
    try:
        yield Page(*ours)
    finally:
        for descriptor in ours:
            os.close(descriptor)  # it ends with its pipe
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
