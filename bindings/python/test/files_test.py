"""Cache files, packed files and libraries."""
import datetime
import unittest

from support import FACT, QUESTION, Case, document

import kvasir
from kvasir import Phase, Status


class Files(Case):
    def test_a_packed_document_is_restored_bit_for_bit(self):
        saved, packed, restored = (self.folder / name for name in ("a.kv", "a.kvz", "b.kv"))
        phases = []

        def progress(phase, *_):
            phases.append(phase)

        session = self.prefilled()
        session.save(saved, progress=progress)
        kvasir.verify(saved, progress=progress)
        kvasir.pack(saved, packed, level=3, progress=progress)
        kvasir.unpack(packed, restored, progress=progress)
        self.assertEqual(restored.read_bytes(), saved.read_bytes())
        expected = [Phase.SAVE, Phase.VERIFY, Phase.PACK, Phase.UNPACK]
        self.assertEqual([p for p in dict.fromkeys(phases) if p != Phase.PREPARE], expected)
        info, packed_info = kvasir.inspect(saved), kvasir.inspect_packed(packed)
        self.assertEqual(info.precision, kvasir.Precision.INT8)
        self.assertEqual(info.tokens, len(session.tokens))
        self.assertEqual(info.file_bytes, saved.stat().st_size)
        self.assertEqual(packed_info.document_bytes, info.file_bytes)
        self.assertEqual(packed_info.level, 3)

    def test_files_that_do_not_fit_are_refused(self):
        saved, packed = self.folder / "a.kv", self.folder / "a.kvz"
        session = self.prefilled()
        session.save(saved)
        kvasir.pack(saved, packed)
        self.assert_status(Status.NOT_A_CACHE, kvasir.inspect, packed)
        self.assert_status(Status.BAD_ARGUMENT, kvasir.pack, saved, saved)
        self.assert_status(Status.BAD_ARGUMENT, kvasir.pack, saved, packed, level=20)
        with kvasir.Cancel() as token:
            token.fire()
            self.assert_status(Status.CANCELLED, kvasir.verify, saved, cancel=token)
            self.assert_status(Status.CANCELLED, session.save, saved, cancel=token)
        saved.write_bytes(saved.read_bytes()[:-1])
        self.assertIsNotNone(self.assert_status(Status.CORRUPT, kvasir.verify, saved).offset)
        self.assert_status(Status.NOT_FOUND, kvasir.verify, self.folder / "missing")


class Libraries(Case):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "library"
        self.library = kvasir.Library(self.path)
        self.addCleanup(self.library.close)

    def test_a_text_is_prefilled_once(self):
        library = self.library
        session, result = library.session(self.model, document(), name="first", decode="full")
        self.assertEqual(result.save_status, Status.OK)
        self.assertEqual((result.saved, result.tokens_found, result.name), (True, 0, "first"))
        self.assertEqual(session.ask(QUESTION).text, FACT)
        session.close()
        phases = []
        session, result = library.session(
            self.model, document(), verify=True, progress=lambda phase, *_: phases.append(phase)
        )
        self.assertEqual((result.saved, result.tokens_found), (False, result.tokens))
        self.assertIn(Phase.VERIFY, phases)
        self.assert_status(Status.BUSY, library.remove, "first")
        with session, library.session(self.model, document() + " More.")[0] as longer:
            self.assertGreater(len(longer.tokens), len(session.tokens))
        self.assertEqual(len(list(library)), 2)

    def test_documents_are_listed_with_their_status(self):
        session, result = self.library.session(self.model, document(600), name="größe")
        session.close()
        (self.path / "damaged.kv").write_bytes(b"\x8bKVC\r\n\x1a\n")
        (self.path / "other.kv").write_bytes(b"nothing")
        found = {d.name: d for d in self.library}
        self.assertEqual(set(found), {"größe", "damaged"})
        self.assertEqual(found["damaged"].status, Status.CORRUPT)
        good = found["größe"]
        self.assertEqual((good.status, good.tokens), (Status.OK, result.tokens))
        self.assertEqual(good.fingerprint, self.model.info.fingerprint)
        age = datetime.datetime.now(datetime.timezone.utc) - good.last_used
        self.assertLess(abs(age), datetime.timedelta(minutes=10))

    def test_documents_are_replaced_renamed_and_removed(self):
        library = self.library
        library.session(self.model, "a", name="old")[0].close()
        library.rename("old", "größe")
        for text, replace in [("b", False), ("c", False), ("d", True)]:
            session, result = library.session(self.model, text, name="größe", replace=replace)
            session.close()
            self.assertEqual(result.name == "größe", replace)
        library.remove("größe")
        self.assert_status(Status.NOT_FOUND, library.remove, "größe")

    def test_what_no_document_can_be_is_refused(self):
        session = self.library.session
        self.assert_status(Status.BAD_ARGUMENT, session, self.model, "")
        self.assert_status(Status.BAD_ARGUMENT, session, self.model, "a", name="a/b")
        stop = lambda *_: True  # noqa: E731
        self.assert_status(Status.CANCELLED, session, self.model, document(4000), progress=stop)
        self.assert_status(Status.NOT_FOUND, kvasir.Library, self.folder / "none" / "library")


unittest.main()
