"""A headless Chromium driven over its DevTools pipe: no driver program, no WebSocket, nothing but the
browser.

Protocol: https://chromedevtools.github.io/devtools-protocol/ ; messages are JSON, each ended by a NUL byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--hide-scrollbars --remote-debugging-pipe"
).split()
CODES = {
    **{"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "+": 187, "/": 191},
    **{"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40},
}
"""Windows' codes of keys that are no letter or digit."""
# The browser reads commands from descriptor 3 and writes to 4; this puts the pipe's ends there.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_chrome() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chrome:
    """One browser with one page. `problems` collects uncaught exceptions and logged errors."""

    def __init__(self, profile: Path):
        chrome = find_chrome()
        assert chrome is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        command = [sys.executable, "-c", LAUNCH, *map(str, high), chrome, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.problems: list[str] = []
        [target] = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(20)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait(20)
            os.close(self._in)
            os.close(self._out)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, seconds: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append("a dialog opened")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, awaited."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"still waiting for: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Types into whatever has the focus, as a keyboard would."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, times: int = 1, *, ctrl: bool = False, shift: bool = False) -> None:
        """Presses a key, which types its text unless Ctrl is held."""
        text = "\r" if key == "Enter" else key if len(key) == 1 and not ctrl else ""
        code, held = CODES.get(key, ord(key[0].upper())), 2 * ctrl + 8 * shift
        for kind in ("keyDown", "keyUp") * times:
            event = {"type": kind, "key": key, "text": text, "windowsVirtualKeyCode": code, "modifiers": held}
            self.send("Input.dispatchKeyEvent", **event)

    def screenshot(self, path: Path, *, width: int = 900, height: int = 700, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))
