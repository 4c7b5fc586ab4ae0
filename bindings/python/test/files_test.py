"""Saved documents as files, and the library of documents."""
import unittest

from support import FACT, QUESTION, Case, document

import kvasir
from kvasir import Status


class Files(Case):
    def test_a_packed_document_comes_back_bit_for_bit(self):
        saved, packed, restored = (self.folder / name for name in ("a.kv", "a.kvz", "b.kv"))
        phases = []
        session = self.prefilled()
        session.save(saved, progress=lambda phase, *_: phases.append(phase))
        kvasir.verify(saved, progress=lambda phase, *_: phases.append(phase))
        kvasir.pack(saved, packed, level=3, progress=lambda phase, *_: phases.append(phase))
        kvasir.unpack(packed, restored, progress=lambda phase, *_: phases.append(phase))
        self.assertEqual(restored.read_bytes(), saved.read_bytes())
        self.assertEqual(list(dict.fromkeys(phases)), [kvasir.Phase.SAVE, kvasir.Phase.VERIFY, kvasir.Phase.PACK, kvasir.Phase.UNPACK])
        info, packed_info = kvasir.inspect(saved), kvasir.inspect_packed(packed)
        self.assertEqual((info.tokens, info.file_bytes, info.precision), (len(session.tokens), saved.stat().st_size, kvasir.Precision.INT8))
        self.assertEqual((packed_info.document_bytes, packed_info.level), (info.file_bytes, 3))
        self.assert_status(Status.NOT_A_CACHE, "", kvasir.inspect, packed)
        self.assert_status(Status.BAD_ARGUMENT, "", kvasir.pack, saved, saved)
        self.assert_status(Status.BAD_ARGUMENT, "", kvasir.pack, saved, packed, level=20)
        with kvasir.Cancel() as token:
            token.fire()
            self.assert_status(Status.CANCELLED, "", kvasir.verify, saved, cancel=token)
            self.assert_status(Status.CANCELLED, "", session.save, saved, cancel=token)
        restored.write_bytes(saved.read_bytes()[:-1])
        self.assertIsNotNone(self.assert_status(Status.CORRUPT, "", kvasir.verify, restored).offset)
        self.assert_status(Status.NOT_FOUND, "", kvasir.verify, self.folder / "missing")

    def test_a_text_is_read_once(self):
        path = self.folder / "library"
        with kvasir.Library(path) as library:
            session, result = library.session(self.model, document(), name="first", strategy="full")
            self.assertEqual((result.saved, result.tokens_found, result.name, result.save_status), (True, 0, "first", Status.OK))
            self.assertEqual(session.ask(QUESTION).text, FACT)
            session.close()
            phases = []
            session, result = library.session(self.model, document(), verify=True, progress=lambda phase, *_: phases.append(phase))
            self.assertEqual((result.saved, result.tokens_found), (False, result.tokens))
            self.assertIn(kvasir.Phase.VERIFY, phases)
            self.assert_status(Status.BUSY, "", library.remove, "first")
            with session, library.session(self.model, document() + " More.")[0] as longer:
                self.assertGreater(len(longer.tokens), len(session.tokens))
            self.assertEqual(len(list(library)), 2)
            library.rename("first", "größe")
            (path / "damaged.kv").write_bytes(b"\x8bKVC\r\n\x1a\n")
            (path / "other.kv").write_bytes(b"nothing")
            found = {d.name: d for d in library}
            self.assertEqual(found["größe"].tokens, result.tokens)
            self.assertEqual(found["größe"].fingerprint, self.model.info.fingerprint)
            self.assertEqual(found["damaged"].status, Status.CORRUPT)
            self.assertNotIn("other", found)
            for text, replace in [("b", False), ("c", False), ("d", True)]:
                taken, result = library.session(self.model, document() + text, name="größe",
                                                replace=replace)
                taken.close()
                self.assertEqual(result.name == "größe", replace)
            library.remove("größe")
            self.assert_status(Status.NOT_FOUND, "größe", library.remove, "größe")
            self.assert_status(Status.BAD_ARGUMENT, "", library.session, self.model, "")
            self.assert_status(Status.BAD_ARGUMENT, "", library.session, self.model, "a", name="a/b")
            self.assert_status(Status.CANCELLED, "", library.session, self.model, document(4000), progress=lambda *_: True)
        self.assert_status(Status.NOT_FOUND, "", kvasir.Library, self.folder / "none" / "library")


unittest.main()
