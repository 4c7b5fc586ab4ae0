"""Drives the assistant as a user does: its window through the accessibility bus, as a screen reader sees it, and the keyboard.

Runs on a virtual display and a message bus of its own: `inside()` starts the calling script again there, or ends it with what is missing.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

SKIPPED = 77  # to meson
NEEDS = ["Xvfb", "dbus-run-session", "xdotool"]

try:
    import gi
    gi.require_version("Atspi", "2.0")
    from gi.repository import Atspi
except (ImportError, ValueError):
    Atspi = None


def inside():
    """Goes on only on a display and bus that are this script's."""
    if os.environ.get("DESK_DRIVEN"):
        return
    missing = [program for program in NEEDS if not shutil.which(program)]
    if missing:
        print(f"skipped: {', '.join(missing)} not found: tools/setup desk installs it")
        sys.exit(SKIPPED)
    python = sys.executable
    if Atspi is None:  # Debian's own has the modules that its packages bring
        python = "/usr/bin/python3"
        probe = "import gi; gi.require_version('Atspi', '2.0')"
        if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode != 0:
            print("skipped: Python finds no Atspi: tools/setup desk installs it")
            sys.exit(SKIPPED)
    environment = dict(os.environ, DESK_DRIVEN="1", GSK_RENDERER="cairo", GDK_BACKEND="x11")
    for name in ["WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "AT_SPI_BUS_ADDRESS", "XAUTHORITY"]:
        environment.pop(name, None)
    read, write = os.pipe()
    with subprocess.Popen(["Xvfb", "-displayfd", str(write), "-screen", "0", "1200x760x24", "-nolisten", "tcp"], pass_fds=[write],
                          stderr=subprocess.DEVNULL) as display:
        os.close(write)
        with os.fdopen(read) as told:
            environment["DISPLAY"] = ":" + told.readline().strip()
        status = subprocess.run(["dbus-run-session", "--", python, "-W", "ignore", *sys.argv], env=environment, check=False).returncode
        display.terminate()
    sys.exit(status)


class Failure(Exception):
    pass


def wait(what, condition, seconds=60):
    """The first true value of condition; a window that is just changing is asked again."""
    end = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except gi.repository.GLib.Error:
            value = None
        if value:
            return value
        if time.monotonic() > end:
            raise Failure(f"not within {seconds} s: {what}")
        time.sleep(0.1)


def name_of(node):
    return node.get_name().replace("\u00a0", " ")


def children(node):
    return filter(None, (node.get_child_at_index(i) for i in range(node.get_child_count())))


def nodes(node):
    yield node
    for child in children(node):
        yield from nodes(child)


class Desk:
    """One run of the program."""

    slow = 30000  # ms, for an answer of a window on a busy machine

    def __init__(self, program, place, *arguments, model=None):
        Atspi.set_timeout(self.slow, 2 * self.slow)
        self.place = pathlib.Path(place)
        self.data = self.place / "data" / "kvasir-desk"
        self.arguments = [program, *(["--model", model] if model else []), *arguments]
        self.environment = dict(os.environ, XDG_DATA_HOME=str(self.place / "data"), XDG_CONFIG_HOME=str(self.place / "config"),
                                XDG_CACHE_HOME=str(self.place / "cache"), XDG_RUNTIME_DIR=str(self.place))
        self.log = open(self.place / "log.txt", "a+", encoding="utf-8")
        self.process = subprocess.Popen(list(map(str, self.arguments)), env=self.environment, stdout=self.log, stderr=self.log)
        try:
            self.frame = wait("the window", self._frame, 180)
        except Failure:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self):
        return self

    def __exit__(self, failed, *rest):
        if failed and self.process.poll() is None:
            sys.stderr.write("".join(f"  {label}\n" for window in self.windows() for label in self.labels(window)))
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if failed:
            self.log.seek(0)
            sys.stderr.write(self.log.read())
        self.log.close()

    def _frame(self):
        if self.process.poll() is not None:
            raise Failure(f"it ended with {self.process.returncode}")
        for application in children(Atspi.get_desktop(0)):
            if application.get_process_id() == self.process.pid:
                application.set_cache_mask(Atspi.Cache.NONE)  # it would not notice widgets that are hidden and shown
                for frame in children(application):
                    return frame
        return None

    def open(self, path):
        """As a file manager does it: a second run hands the file to the first."""
        subprocess.run([self.arguments[0], str(path)], env=self.environment, check=True, timeout=60, stdout=self.log, stderr=self.log)

    # ---- what there is to see

    def page(self):
        """Of the document that is chosen: its name is the window's."""
        for node in nodes(self.frame):
            if node.get_name() == "DeskPage" and any(name_of(child) == name_of(self.frame) for child in nodes(node)):
                return node
        return None

    def find(self, role, pattern, under=None, state=None):
        for node in nodes(under or self.frame):
            if node.get_role_name() == role and re.search(pattern, name_of(node)) and (state is None or node.get_state_set().contains(state)):
                return node
        return None

    def labels(self, under=None):
        return [name_of(node) for node in nodes(under or self.frame) if node.get_role_name() == "label"]

    def says(self, pattern, seconds=60):
        """A label of the chosen document's page."""
        def look():
            page = self.page()
            return page and next((label for label in self.labels(page) if re.search(pattern, label)), None)
        return wait(f"a label with {pattern!r}", look, seconds)

    def row(self, pattern):
        return self.find("list item", pattern)

    def passages(self):
        lists = [node for node in nodes(self.page()) if node.get_name() == "Passages that the answer attended"]
        return [row for row in (children(lists[-1]) if lists else []) if row.get_role_name() == "list item"]

    def windows(self):
        return [window for window in children(self.frame.get_parent())]

    def in_dialogs(self, role, pattern):
        for window in self.windows():
            found = self.find(role, pattern, window) if window != self.frame else None
            if found:
                return found
        return None

    # ---- what there is to do

    def press_in_dialogs(self, button):
        self.act(wait(f"the button {button!r} of a dialog", lambda: self.in_dialogs("push button", button), 30), "click")

    def close_dialogs(self):
        while self.in_dialogs("push button", "Close"):
            self.act(self.in_dialogs("push button", "Close"), "click")
            time.sleep(0.5)

    def press_passage(self, row):
        self.act(self.find("push button", "Show It in the Document", row), "click")

    def press(self, button, seconds=60):
        def ready():
            node = self.find("push button", button, self.page() or self.frame, Atspi.StateType.SENSITIVE)
            return node or self.find("push button", button, self.frame, Atspi.StateType.SENSITIVE)
        self.act(wait(f"the button {button!r}", ready, seconds), "click")

    def act(self, node, action):
        for i in range(node.get_n_actions()):
            if node.get_action_name(i) == action:
                return node.do_action(i)
        raise Failure(f"{name_of(node)!r} has no action {action!r}")

    def choose(self, pattern):
        row = wait(f"the document {pattern!r}", lambda: self.row(pattern))
        place = row.get_index_in_parent()
        row.get_parent().select_child(place)

    def ask(self, question, by_keyboard=False):
        entry = wait("the entry", lambda: self.page() and self.find("text", "^Question$", self.page()))
        entry.set_text_contents(question)
        if by_keyboard:
            self.key("Return")
        else:
            self.press("^Ask$")

    def key(self, keys):
        found = subprocess.run(["xdotool", "search", "--onlyvisible", "--pid", str(self.process.pid)], capture_output=True, text=True, check=False)
        for window in found.stdout.split():
            subprocess.run(["xdotool", "windowfocus", window], capture_output=True, check=False)
        subprocess.run(["xdotool", "key", keys], check=True)

    def quit(self, seconds=60):
        self.key("ctrl+q")
        return self.ended(seconds)

    def ended(self, seconds=60):
        wait("its end", lambda: self.process.poll() is not None, seconds)
        if self.process.returncode != 0:
            raise Failure(f"it ended with {self.process.returncode}")
