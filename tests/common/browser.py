"""Opens a page from disk in a headless Chromium, and prints the results as JSON.

    browser.py CHROMIUM PAGE [--widths 360,768,1440] [--dark] [--eval EXPRESSION]... [--screenshot FILE --size 1280x900]

The browser is driven by the DevTools protocol over pipes, which needs only Python. The output has the messages of the console,
exceptions, requests other than that of the page, whether something is cut off at each width, and the values of the expressions.
"""

import argparse
import base64
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

LIMIT = 60


class Browser:
    def __init__(self, program, home):
        commands, self.to = os.pipe()
        self.answers, events = os.pipe()

        def connect_pipes():
            # Chromium reads commands from 3 and writes to 4.
            first, second = os.dup(commands), os.dup(events)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
             "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir=" + home],
            preexec_fn=connect_pipes, pass_fds=(3, 4, commands, events), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(events)
        self.rest, self.number, self.session, self.events = b"", 0, None, []

    def read(self, until):
        while b"\0" not in self.rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                return None
            more = os.read(self.answers, 1 << 16)
            if not more:
                sys.exit("the browser has ended")
            self.rest += more
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def ask(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while (answer := self.read(until)) is not None:
            if answer.get("id") == self.number:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)
        sys.exit(f"{method}: no answer within {LIMIT} s")

    def wait_for(self, event):
        until = time.monotonic() + LIMIT
        while not any(one.get("method") == event for one in self.events):
            one = self.read(until)
            if one is None:
                sys.exit(f"no {event} within {LIMIT} s")
            self.events.append(one)

    def value(self, expression):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            sys.exit(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def resize(self, width, height, scale=1):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        # Wait for two frames, in which the page adapts.
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.value("new Promise((done) => setTimeout(done, 50))")

    def of(self, event):
        return [one["params"] for one in self.events if one.get("method") == event]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program")
    arguments.add_argument("page")
    arguments.add_argument("--widths", default="")
    arguments.add_argument("--dark", action="store_true")
    arguments.add_argument("--eval", action="append", default=[])
    arguments.add_argument("--screenshot")
    arguments.add_argument("--size", default="1280x900")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        browser = Browser(given.program, home)
        try:
            target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
            browser.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ["Page", "Runtime", "Log", "Network"]:
                browser.ask(domain + ".enable")
            scheme = {"name": "prefers-color-scheme", "value": "dark" if given.dark else "light"}
            browser.ask("Emulation.setEmulatedMedia", features=[scheme])
            width, height = map(int, given.size.split("x"))
            browser.resize(width, height)
            page = pathlib.Path(given.page).absolute().as_uri()
            browser.events.clear()
            browser.ask("Page.navigate", url=page)
            browser.wait_for("Page.loadEventFired")
            browser.value("new Promise((done) => setTimeout(done, 100))")
            cut_off = {}
            for width in filter(None, given.widths.split(",")):
                browser.resize(int(width), 900)
                cut_off[width] = browser.value("document.documentElement.scrollWidth > innerWidth")
            values = [browser.value(expression) for expression in given.eval]
            if given.screenshot:
                browser.resize(*map(int, given.size.split("x")))
                picture = browser.ask("Page.captureScreenshot", format="png")["data"]
                pathlib.Path(given.screenshot).write_bytes(base64.b64decode(picture))
            requests = [one["request"]["url"] for one in browser.of("Network.requestWillBeSent")]
            console = browser.of("Runtime.consoleAPICalled") + [one["entry"] for one in browser.of("Log.entryAdded")]
            # An inline icon (data: URL) is not a request.
            print(json.dumps({
                "console": console,
                "exceptions": browser.of("Runtime.exceptionThrown"),
                "requests": [url for url in requests if url != page and not url.startswith("data:")],
                "cut_off": cut_off,
                "values": values,
            }))
        finally:
            browser.process.kill()
            browser.process.wait()


main()
