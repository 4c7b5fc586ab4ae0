"""Parts that the tests share.

The build sets the paths: KVASIR_MODEL, KVASIR_TOOL, KVASIR_INCLUDE_DIR, KVASIR_LIB_DIR. The
loader's path has the library.
"""
import os
import pathlib
import sys
import tempfile
import unittest

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: numpy is not installed")
    sys.exit(77)
if sys.version_info < (3, 10):
    print("skipped: Python is older than 3.10")
    sys.exit(77)

import kvasir  # noqa: E402

MODEL = pathlib.Path(os.environ["KVASIR_MODEL"])
FACT = "The access code of the north gate is 4821907."
QUESTION = "What is the access code of the north gate?"


def document(characters=1500):
    """A few hundred tokens with the fact in the middle."""
    book = (MODEL.parent / "sherlock-holmes.txt").read_text(encoding="utf-8")
    book = book[2000 : 2000 + characters]
    return f"{book} {FACT} {book}"


def long_text():
    """Text whose prefill takes minutes."""
    return (MODEL.parent / "sherlock-holmes.txt").read_text(encoding="utf-8")[:200_000]


class Case(unittest.TestCase):
    """One model for all tests of a file, a folder for each test."""

    @classmethod
    def setUpClass(cls):
        cls.model = kvasir.Model(MODEL)
        cls.addClassCleanup(cls.model.close)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def prefilled(self, **options):
        """A session that has prefilled the document."""
        session = self.model.session(**options)
        self.addCleanup(session.close)
        session.prefill(document())
        return session

    def assert_status(self, status, function, *arguments, **options):
        """Asserts the status of the failure and returns the exception."""
        with self.assertRaises(kvasir.Error) as caught:
            function(*arguments, **options)
        self.assertEqual(caught.exception.status, status, caught.exception)
        return caught.exception

    def assert_closed(self, function, *arguments, **options):
        """Asserts that the call is refused because a handle is closed."""
        error = self.assert_status(kvasir.Status.BAD_ARGUMENT, function, *arguments, **options)
        self.assertIn("is closed", str(error))
