"""What the tests share. Paths come from the build: KVASIR_MODEL, KVASIR_TOOL, KVASIR_INCLUDE_DIR, KVASIR_LIB_DIR; the loader's path has the library."""
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
if sys.version_info < (3, 9):
    print("skipped: Python is older than 3.9")
    sys.exit(77)

import kvasir  # noqa: E402

MODEL = pathlib.Path(os.environ["KVASIR_MODEL"])
FACT = "The access code of the north gate is 4821907."
QUESTION = "What is the access code of the north gate?"


def document(characters=1500):
    """A few hundred tokens with the fact in the middle."""
    book = (MODEL.parent / "sherlock-holmes.txt").read_text(encoding="utf-8")[2000 : 2000 + characters]
    return f"{book} {FACT} {book}"


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

    def reader(self, **options):
        """A session that has read the document."""
        session = self.model.session(**options)
        self.addCleanup(session.close)
        session.prefill(document())
        return session

    def assertStatus(self, status, message, function, *arguments, **options):
        with self.assertRaises(kvasir.Error) as caught:
            function(*arguments, **options)
        self.assertEqual(caught.exception.status, status, caught.exception)
        self.assertIn(message, str(caught.exception))
        return caught.exception
