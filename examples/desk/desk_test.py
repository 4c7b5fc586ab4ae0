"""Drives the assistant with the bundled model on a virtual display.

desk_test.py PROGRAM EXAMPLES [CASE...]
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback

import drive
from drive import Desk, Failure, wait

FACT = "The access code of the north gate is 4821907."
QUESTION = "What is the access code of the north gate?"
KEY_FACT = "The pass key is 71432."
KEY_QUESTION = "What is the pass key?"


def expect(condition, what):
    if not condition:
        raise Failure(what)


class Cases:
    def __init__(self, program, examples):
        self.program, self.examples = program, pathlib.Path(examples)
        self.book = (self.examples / "sherlock-holmes.txt").read_text()

    def start(self, place, *arguments, **options):
        return Desk(self.program, place, *arguments, **options)

    def document(self, place, name, size, fact=FACT, start=2000):
        """Characters of the book with a fact in the middle."""
        path = place / name
        half = size // 2
        before, behind = self.book[start:start + half], self.book[start + half:start + size]
        path.write_text(f"{before} {fact} {behind}")
        return path

    @staticmethod
    def caches(place):
        return sorted((place / "data" / "kvasir-desk" / "caches").glob("*/*.kv"))

    def leaves_nothing(self, place):
        expected = (".kv", ".txt", ".conversation")
        files = [p for p in (place / "data" / "kvasir-desk").rglob("*") if p.is_file()]
        names = [p.name for p in files if p.suffix not in expected and p.name != ".lock"]
        expect(not names, f"left behind: {names}")

    # ---- cases

    def demonstration(self, place):
        """The demonstration's text is prefilled once, answered, quoted and shown; then mapped."""
        with self.start(place, self.examples / "demo.txt") as desk:
            desk.says(r"Prefilling \d[\d.]*% · (about .*|a few seconds) left", 300)
            desk.says("^Ready: about .* pages", 1800)
            desk.ask(QUESTION, by_keyboard=True)
            desk.says(f"^{re.escape(FACT)}$", 120)
            desk.says(r"^\d[\d.]*% of the document read · first word after")
            rows = wait("passages", desk.passages)
            expect(FACT in drive.name_of(rows[0]), f"the first passage is {drive.name_of(rows[0])}")
            desk.press_passage(rows[0])
            text = desk.find("text", "The document's text", desk.page())
            def shown():
                at = text.get_caret_offset()
                return FACT in text.get_text(at, at + 400)
            wait("the passage in the document", shown, 20)
            desk.quit()
        with self.start(place) as desk:
            began = time.monotonic()
            desk.choose("^demo,")
            desk.ask(KEY_QUESTION)
            desk.says(f"^{re.escape(KEY_FACT)}$", 60)
            print(f"  mapped and answered after {time.monotonic() - began:.1f} s")
            desk.quit()
        self.leaves_nothing(place)

    def all_documents(self, place):
        """All documents are asked at once; a source is named and shown in its document."""
        other = "The access code of the south gate is 5530914."
        paths = [self.document(place, "north.txt", 4000),
                 self.document(place, "south.txt", 4000, other, 9000)]
        with self.start(place, *paths) as desk:
            for name in ("north", "south"):
                desk.choose(f"^{name},")
                desk.says("^Ready: about .* page", 300)
            desk.press("Ask All Documents")
            wait("the page", lambda: drive.name_of(desk.frame) == "All Documents", 20)
            desk.ask("What is the access code of the south gate?")
            desk.says(f"^{re.escape(other)}$", 120)
            desk.says("of 2 documents read · first word after")
            rows = wait("sources", desk.passages)
            expect(other in drive.name_of(rows[0]), f"the first source is {drive.name_of(rows[0])}")
            desk.says("^south · .* of the attention")
            desk.press_passage(rows[0])
            wait("the document", lambda: drive.name_of(desk.frame) == "south", 20)
            text = desk.find("text", "The document's text", desk.page())
            def shown():
                at = text.get_caret_offset()
                return other in text.get_text(at, at + 400)
            wait("the passage in the document", shown, 20)
            desk.quit()
        self.leaves_nothing(place)

    def stopped(self, place):
        """A stopped prefill is saved and answers; it continues, also in the next run."""
        path = self.document(place, "long.txt", 60000)
        path.write_text(f"{KEY_FACT} Remember it. 71432 is the pass key. " + path.read_text())
        with self.start(place, path) as desk:
            desk.says(r"Prefilling [1-9][\d.]*%", 120)
            desk.key("Escape")
            part = desk.says(r"[\d.]+% prefilled: answers", 60)
            print(f"  {part}")
            desk.ask(KEY_QUESTION)
            desk.says(f"^{re.escape(KEY_FACT)}$", 60)
            desk.quit()
        with self.start(place) as desk:
            share = re.search(r"[\d.]+%", part)[0]
            wait("the row", lambda: desk.row(f"^long, {re.escape(share)} prefilled"), 30)
            desk.choose("^long,")
            expect(desk.says(r"[\d.]+% prefilled: answers", 30) == part, "another part was saved")
            desk.press("^_?Continue")
            desk.says(r"Prefilling \d[\d.]*%", 30)
            desk.press("^_?Stop")
            more = desk.says(r"[\d.]+% prefilled: answers", 60)
            number = re.compile(r"[\d.]+")
            grown = float(number.search(more)[0]) >= float(number.search(part)[0])
            expect(grown, f"{more} after {part}")
            desk.press("^_?Continue")
            wait("the whole text", lambda: desk.row("^long, about .* pages"), 300)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 120)
            desk.quit()

    def answer_stopped(self, place):
        """Escape stops an answer, and the next question is answered."""
        with self.start(place, self.document(place, "short.txt", 8000)) as desk:
            desk.says("^Ready", 300)
            for _ in range(5):  # it may be over before it can be stopped
                desk.ask("Repeat all of the document from its beginning, word by word.")
                time.sleep(0.5)
                desk.key("Escape")
                time.sleep(1)
                labels = desk.labels(desk.page())
                if any(label.endswith("(stopped)") or label == "Stopped" for label in labels):
                    break
            desk.says(r"\(stopped\)$|^Stopped$", 20)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 60)
            desk.quit()

    def damaged(self, place):
        """Damage is explained, the document prefilled again, and the question answered."""
        path = self.document(place, "letter.txt", 20000)
        with self.start(place, path) as desk:
            desk.says("^Ready", 300)
            desk.quit()
        damages = [("pages", 0.2, 0.6), ("the header", 0, 0.0001)]
        for count, (what, at, size) in enumerate(damages, 1):
            cache = self.caches(place)[0]
            data = bytearray(cache.read_bytes())
            begin = max(32, int(len(data) * at))  # behind the file's magic number
            for i in range(begin, begin + max(64, int(len(data) * size)), 16):
                data[i] ^= 0xFF
            cache.write_bytes(data)
            with self.start(place) as desk:
                if what == "the header":
                    wait("the row", lambda: desk.row("^letter, Not prefilled yet: .* unusable"), 30)
                desk.choose("^letter,")
                desk.ask(QUESTION)
                notice = desk.says("The saved file of “letter” is damaged", 60)
                print(f"  {what}: {notice}")
                wait("the answer",
                     lambda count=count: desk.labels(desk.page()).count(FACT) == count, 300)
                desk.quit()

    def another_model(self, place):
        """Two models prefill one document once each. A file of another text is explained."""
        path = self.document(place, "letter.txt", 4000)
        with self.start(place, path) as desk:
            desk.says("^Ready", 300)
            desk.quit()
        other = place / "other.gguf"
        data = bytearray((self.examples / "mini-reader-q8_0.gguf").read_bytes())
        for at in range(len(data) // 4, len(data), 1 << 16):  # of the weights
            data[at] ^= 1
        other.write_bytes(data)
        with self.start(place, model=other) as desk:
            desk.choose("^letter,")
            desk.says("^Ready", 300)
            desk.quit()
        both = {cache: cache.read_bytes() for cache in self.caches(place)}
        expect(len(both) == 2, f"cache files: {both.keys()}")
        with self.start(place) as desk:
            desk.choose("^letter,")
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 120)
            desk.quit()
        now = {cache: cache.read_bytes() for cache in self.caches(place)}
        expect(both == now, "a document was prefilled again")
        text = place / "data" / "kvasir-desk" / "texts" / "letter.txt"
        text.write_text(f"{self.book[9000:11000]} {FACT} {self.book[11000:12000]}")
        with self.start(place, model=other) as desk:
            desk.choose("^letter,")
            desk.says("The saved file of “letter” has another text", 60)
            desk.says("^Ready", 300)
            desk.quit()

    def meanwhile(self, place):
        """A document answers while another is prefilled."""
        short = self.document(place, "short.txt", 6000)
        long = self.document(place, "long.txt", 200000, start=20000)
        with self.start(place, short) as desk:
            desk.says("^Ready", 300)
            desk.open(long)
            wait("the second prefill", lambda: desk.row(r"^long, Prefilling \d"), 60)
            desk.choose("^short,")
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 120)
            expect(desk.row(r"^long, Prefilling"), "the other document is not prefilled any more")
            desk.quit()

    def closed(self, place):
        """Closing the window during a prefill stops it, saves the part, and leaves nothing."""
        path = self.document(place, "long.txt", 300000)
        with self.start(place, path) as desk:
            desk.says(r"Prefilling ([1-9][\d.]*|0.[1-9])%", 120)
            began = time.monotonic()
            desk.press("^Close$")
            desk.ended(60)
            print(f"  ended after {time.monotonic() - began:.1f} s")
        self.leaves_nothing(place)
        expect(len(self.caches(place)) == 1, "the prefilled part is not saved")
        with self.start(place) as desk:
            desk.choose("^long,")
            desk.says(r"[\d.]+% prefilled: answers", 30)
            desk.quit()

    def no_model(self, place):
        """A page reports a model that cannot be opened."""
        with self.start(place, model=place / "missing.gguf") as desk:
            wait("the message", lambda: any("missing.gguf" in label for label in desk.labels()), 30)
            expect(desk.find("push button", "Choose a Model"), "no model can be chosen")
            desk.quit()

    def kinds(self, place):
        """Markdown, PDF and old encodings work; bad files are reported in one banner."""
        first, second = self.book[3000:4500], self.book[4500:6000]
        (place / "notes.md").write_text(f"# Notes\n\n- {first}\n- {FACT}\n- {second}\n")
        old = f"Café. {first} {FACT} {second}"
        (place / "old.txt").write_bytes(old.encode("cp1252", "replace"))
        lines = ["To whom it may concern.", FACT, "With kind regards."]
        (place / "page.pdf").write_bytes(pdf(lines))
        for name, message in [("noise.txt", b"\x00\x01\x02" * 500), ("empty.txt", b" \n")]:
            (place / name).write_bytes(message)
        with self.start(place, place / "notes.md") as desk:
            for name in ["notes", "old", "page"]:
                if name != "notes":
                    desk.open(place / ("page.pdf" if name == "page" else "old.txt"))
                wait(f"{name} is chosen", lambda name=name: drive.name_of(desk.frame) == name, 60)
                desk.says("^Ready", 300)
                desk.ask(QUESTION)
                desk.says(f"^{re.escape(FACT)}$", 120)
            for name, reason in [("noise.txt", "neither a text nor a PDF"),
                                 ("empty.txt", "it is empty"), ("gone.txt", "is not there")]:
                desk.open(place / name)
                wait(f"the banner for {name}",
                     lambda reason=reason: any(reason in label for label in desk.labels()), 30)
                expect(len(desk.windows()) == 1, "a dialog")
                desk.dismiss()
            expect(len(self.caches(place)) == 3, f"saved: {self.caches(place)}")
            desk.quit()

    def too_long(self, place):
        """A text longer than the model's context is reported; its first part can be used."""
        long = place / "Sherlock Holmes.txt"
        long.write_text(self.book)
        with self.start(place, long) as desk:
            desk.says(r"too long for the model \(150,654 of 131,072 tokens\)", 60)
            wait("the row", lambda: desk.row("^Sherlock Holmes, Too long for the model"), 30)
            remove = wait("a button", lambda: desk.find("push button", "Remove$", desk.page()), 20)
            expect(remove.get_n_actions() > 0, "the button has no action")
            desk.press("Use the First Part")
            desk.says(r"^Prefilling \d[\d.]*%", 60)
            desk.key("Escape")
            desk.says(r"[\d.]+% prefilled: answers", 60)
            desk.quit()
        text = place / "data" / "kvasir-desk" / "texts" / "Sherlock Holmes.txt"
        size = len(text.read_text())
        expect(0.6 * len(self.book) < size < 0.9 * len(self.book), f"{size} characters")

    def conversation(self, place):
        """Questions and answers are there in the next run, with passages, for their owner alone."""
        with self.start(place, self.document(place, "letter.txt", 8000)) as desk:
            desk.says("^Ready", 300)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 60)
            desk.quit()
        file, = (place / "data" / "kvasir-desk" / "caches").glob("*/letter.conversation")
        expect(file.stat().st_mode & 0o777 == 0o600, f"mode {file.stat().st_mode:o}")
        with self.start(place) as desk:
            desk.choose("^letter,")
            desk.says(f"^{re.escape(QUESTION)}$", 30)
            desk.says(f"^{re.escape(FACT)}$", 30)
            first = wait("passages", desk.passages)[0]
            expect("4821907" in drive.name_of(first), f"passage: {drive.name_of(first)}")
            desk.ask(QUESTION)
            wait("two answers", lambda: desk.labels(desk.page()).count(FACT) == 2, 60)
            desk.quit()

    def narrow(self, place):
        """At 360 pixels the library and the text fold. DESK_PICTURE names a file for a picture."""
        with self.start(place, self.document(place, "letter.txt", 8000)) as desk:
            desk.says("^Ready", 300)
            desk.resize(360, 700)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 60)
            time.sleep(2)
            widths = desk.widths()
            expect(widths and max(widths) <= 420, f"{widths} pixels wide")  # with the shadow
            picture = os.environ.get("DESK_PICTURE")
            if picture:
                subprocess.run(["import", "-window", "root", picture], check=True)
            desk.quit()

    def kept(self, place):
        """A known text is not prefilled again; documents are renamed and removed."""
        path = self.document(place, "letter.txt", 4000)
        with self.start(place, path) as desk:
            desk.says("^Ready", 300)
            again = place / "copy.txt"
            again.write_bytes(path.read_bytes())
            desk.open(again)
            time.sleep(2)
            expect(desk.row("^letter,") and not desk.row("^copy"), "a text is there twice")
            desk.act(desk.row("^letter,"), "row.rename")
            entry = wait("the dialog", lambda: desk.in_dialogs("text", "New name"), 30)
            entry.set_text_contents("Old Letter")
            desk.press_in_dialogs("Rename")
            wait("the new name", lambda: desk.row("^Old Letter,"), 30)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 60)
            names = [p.name for p in self.caches(place)]
            expect(names == ["Old Letter.kv"], f"saved: {self.caches(place)}")
            desk.act(desk.row("^Old Letter,"), "row.remove")
            desk.press_in_dialogs("Remove")
            wait("it is gone", lambda: not desk.row("^Old Letter,"), 30)
            desk_data = place / "data" / "kvasir-desk"
            left = [*desk_data.glob("texts/*"), *desk_data.glob("caches/*/*.*")]
            expect([p.name for p in left] in ([], [".lock"]), f"left: {left}")
            desk.quit()


def pdf(lines):
    """A PDF of one page."""
    text = "BT /F1 12 Tf 72 720 Td 16 TL " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
               "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
               " /Resources << /Font << /F1 5 0 R >> >> >>",
               f"<< /Length {len(text)} >>\nstream\n{text}\nendstream",
               "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    data, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n"
    table = len(data)
    count = len(objects) + 1
    data += f"xref\n0 {count}\n0000000000 65535 f \n"
    data += "".join(f"{place:010} 00000 n \n" for place in places)
    data += f"trailer << /Size {count} /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n"
    return data.encode()


def main():
    drive.inside()
    cases = Cases(*sys.argv[1:3])
    names = sys.argv[3:] or [
        "no_model", "kinds", "too_long", "conversation", "narrow", "kept", "answer_stopped",
        "damaged", "another_model", "stopped", "meanwhile", "closed", "all_documents",
        "demonstration"]
    failed = 0
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="desk-") as place:
            try:
                getattr(cases, name)(pathlib.Path(place))
                print(f"{name}: good, {time.monotonic() - began:.0f} s", flush=True)
            except (Failure, OSError, AssertionError) as failure:
                failed += 1
                traceback.print_exc()
                print(f"{name}: FAILED: {failure}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(failed != 0)


main()
