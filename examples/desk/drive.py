"""Drives the assistant as a user does: by the keyboard and by the accessibility bus.

`inside()` starts the calling script again on a virtual display and a message bus of its own. It
ends the script if a program is missing.
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
    """Returns only on a display and a bus of this script."""
    if os.environ.get("DESK_DRIVEN"):
        return
    missing = [program for program in NEEDS if not shutil.which(program)]
    if missing:
        print(f"skipped: {', '.join(missing)} not found: tools/setup desk installs it")
        sys.exit(SKIPPED)
    python = sys.executable
    if Atspi is None:  # Debian's Python has the modules of Debian's packages
        python = "/usr/bin/python3"
        probe = "import gi; gi.require_version('Atspi', '2.0')"
        if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode != 0:
            print("skipped: Python finds no Atspi: tools/setup desk installs it")
            sys.exit(SKIPPED)
    environment = dict(os.environ, DESK_DRIVEN="1", GSK_RENDERER="cairo", GDK_BACKEND="x11")
    for name in ["WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "AT_SPI_BUS_ADDRESS", "XAUTHORITY"]:
        environment.pop(name, None)
    read, write = os.pipe()
    server = ["Xvfb", "-displayfd", str(write), "-screen", "0", "1200x760x24", "-nolisten", "tcp"]
    with subprocess.Popen(server, pass_fds=[write], stderr=subprocess.DEVNULL) as display:
        os.close(write)
        with os.fdopen(read) as number:
            environment["DISPLAY"] = ":" + number.readline().strip()
        command = ["dbus-run-session", "--", python, "-W", "ignore", *sys.argv]
        status = subprocess.run(command, env=environment, check=False).returncode
        display.terminate()
    sys.exit(status)


class Failure(Exception):
    pass


def wait(what, condition, seconds=60):
    """The first true value of condition. A window that changes raises errors meanwhile."""
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
        folders = {"XDG_DATA_HOME": "data", "XDG_CONFIG_HOME": "config", "XDG_CACHE_HOME": "cache",
                   "XDG_RUNTIME_DIR": "."}
        places = {name: str(self.place / folder) for name, folder in folders.items()}
        self.environment = dict(os.environ, **places)
        self.log = open(self.place / "log.txt", "a+", encoding="utf-8")
        self.process = subprocess.Popen(list(map(str, self.arguments)), env=self.environment,
                                        stdout=self.log, stderr=self.log)
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
            for window in self.windows():
                sys.stderr.write("".join(f"  {label}\n" for label in self.labels(window)))
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
                application.set_cache_mask(Atspi.Cache.NONE)  # a cache misses hidden widgets
                for frame in children(application):
                    return frame
        return None

    def open(self, path):
        """Opens a file as a file manager does: a second run passes it to the first."""
        subprocess.run([self.arguments[0], str(path)], env=self.environment, check=True, timeout=60,
                       stdout=self.log, stderr=self.log)

    # ---- state

    def page(self):
        """The page of the chosen document, whose name is the window's, or of all documents."""
        for node in nodes(self.frame):
            title = name_of(self.frame)
            if node.get_name() == "DeskAll" and title == "All Documents":
                return node
            if node.get_name() == "DeskPage" and any(name_of(n) == title for n in nodes(node)):
                return node
        return None

    def find(self, role, pattern, under=None, state=None):
        for node in nodes(under or self.frame):
            if node.get_role_name() != role or not re.search(pattern, name_of(node)):
                continue
            if state is None or node.get_state_set().contains(state):
                return node
        return None

    def labels(self, under=None):
        found = nodes(under or self.frame)
        return [name_of(node) for node in found if node.get_role_name() == "label"]

    def says(self, pattern, seconds=60):
        """A label of the chosen document's page."""
        def look():
            page = self.page()
            labels = self.labels(page) if page else []
            return next((label for label in labels if re.search(pattern, label)), None)
        return wait(f"a label with {pattern!r}", look, seconds)

    def row(self, pattern):
        return self.find("list item", pattern)

    def passages(self):
        name = "Passages that the answer attended"
        lists = [node for node in nodes(self.page()) if node.get_name() == name]
        rows = children(lists[-1]) if lists else []
        return [row for row in rows if row.get_role_name() == "list item"]

    def windows(self):
        return [window for window in children(self.frame.get_parent())]

    def in_dialogs(self, role, pattern):
        for window in self.windows():
            found = self.find(role, pattern, window) if window != self.frame else None
            if found:
                return found
        return None

    # ---- actions

    def press_in_dialogs(self, button):
        found = wait(f"the button {button!r} of a dialog",
                     lambda: self.in_dialogs("push button", button), 30)
        self.act(found, "click")

    def press_passage(self, row):
        self.act(self.find("push button", "Show It in the Document", row), "click")

    def press(self, button, seconds=60):
        def ready():
            for under in filter(None, [self.page(), self.frame]):
                node = self.find("push button", button, under, Atspi.StateType.SENSITIVE)
                if node:
                    return node
            return None
        self.act(wait(f"the button {button!r}", ready, seconds), "click")

    def dismiss(self):
        """Dismisses the banners of the window and of the pages."""
        for node in list(nodes(self.frame)):
            if node.get_role_name() == "push button" and name_of(node) == "Dismiss":
                self.act(node, "click")

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
        entry = wait("the entry",
                     lambda: self.page() and self.find("text", "^Question$", self.page()))
        entry.set_text_contents(question)
        if by_keyboard:
            self.key("Return")
        else:
            self.press("^Ask$")

    def key(self, keys):
        for window in self.x_windows():
            subprocess.run(["xdotool", "windowfocus", window], capture_output=True, check=False)
        subprocess.run(["xdotool", "key", keys], check=True)

    def x_windows(self):
        command = ["xdotool", "search", "--onlyvisible", "--pid", str(self.process.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

    def widths(self):
        """Widths of the windows in pixels."""
        found = []
        for window in self.x_windows():
            command = ["xdotool", "getwindowgeometry", "--shell", window]
            out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            found += [int(width) for width in re.findall(r"^WIDTH=(\d+)", out, re.M)]
        return found

    def resize(self, width, height):
        for window in self.x_windows():
            subprocess.run(["xdotool", "windowsize", window, str(width), str(height)], check=True)

    def quit(self, seconds=60):
        self.key("ctrl+q")
        return self.ended(seconds)

    def ended(self, seconds=60):
        wait("its end", lambda: self.process.poll() is not None, seconds)
        if self.process.returncode != 0:
            raise Failure(f"it ended with {self.process.returncode}")
