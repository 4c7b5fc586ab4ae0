"""Steps of a test that runs programs: each must end well, or the test ends with what it said."""

import os
import subprocess
import sys

SKIPPED = 77  # to meson


def run(*command, folder=None, **variables):
    """What the command prints. folder: where it runs; variables: of its environment."""
    result = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
    )
    if result.returncode != 0:
        sys.exit(
            f"{command}: exit code"
            f" {result.returncode}\n{result.stdout[-8000:]}{result.stderr[-8000:]}"
        )
    return result.stdout


def expect(condition, what):
    if not condition:
        sys.exit(what)
