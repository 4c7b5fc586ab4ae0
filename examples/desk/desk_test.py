"""The assistant does what it says, with the bundled model, on a virtual display: desk_test.py PROGRAM EXAMPLES [CASE...]"""
import pathlib
import re
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
        path.write_text(f"{self.book[start:start + half]} {fact} {self.book[start + half:start + size]}")
        return path

    @staticmethod
    def caches(place):
        return sorted((place / "data" / "kvasir-desk" / "readings").glob("*/*.kv"))

    def leaves_nothing(self, place):
        names = [p.name for p in (place / "data" / "kvasir-desk").rglob("*") if p.is_file() and p.suffix not in (".kv", ".txt") and p.name != ".lock"]
        expect(not names, f"left behind: {names}")

    # ---- cases

    def demonstration(self, place):
        """The demonstration's text is read once with the time left, answered, quoted, shown; and mapped at once the next time."""
        with self.start(place, self.examples / "demo.txt") as desk:
            desk.says(r"Reading \d[\d.]*% · about .* left|Reading \d[\d.]*% · a few seconds left", 300)
            desk.says("were read. Ask what it says", 1800)
            desk.ask(QUESTION, by_keyboard=True)
            desk.says(f"^{re.escape(FACT)}$", 120)
            desk.says(r"^Read \d[\d.]*% of the document · first word after")
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

    def stopped(self, place):
        """A reading that is stopped is kept and answered from; it goes on, also in the next run."""
        path = self.document(place, "long.txt", 60000)
        path.write_text(f"{KEY_FACT} Remember it. 71432 is the pass key. " + path.read_text())
        with self.start(place, path) as desk:
            desk.says(r"Reading [1-9][\d.]*%", 120)
            desk.key("Escape")
            part = desk.says(r"The first [\d.]+% was read", 60)
            print(f"  {part}")
            desk.ask(KEY_QUESTION)
            desk.says(f"^{re.escape(KEY_FACT)}$", 60)
            desk.quit()
        with self.start(place) as desk:
            desk.choose("^long,")
            expect(desk.says(r"The first [\d.]+% was read", 30) == part, "another part was kept")
            desk.press("Go On Reading")
            desk.says(r"Reading \d[\d.]*%", 30)
            desk.press("^_?Stop")
            more = desk.says(r"The first [\d.]+% was read", 60)
            expect(float(re.search(r"[\d.]+", more)[0]) >= float(re.search(r"[\d.]+", part)[0]), f"{more} after {part}")
            desk.press("Go On Reading")
            wait("the whole text", lambda: "were read" in " ".join(desk.labels(desk.page())) or not desk.find("push button", "Go On|^_?Stop", desk.page()), 300)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 120)
            desk.quit()

    def answer_stopped(self, place):
        """Escape stops an answer, and the next question is answered."""
        with self.start(place, self.document(place, "short.txt", 8000)) as desk:
            desk.says("were read", 300)
            for _ in range(5):  # it may be over before it can be stopped
                desk.ask("Repeat all of the document from its beginning, word by word.")
                time.sleep(0.5)
                desk.key("Escape")
                time.sleep(1)
                if any(label.endswith("(stopped)") or label == "Stopped" for label in desk.labels(desk.page())):
                    break
            desk.says(r"\(stopped\)$|^Stopped$", 20)
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 60)
            desk.quit()

    def damaged(self, place):
        """A damaged reading is explained, read again, and the question that met the damage is answered; so is one with a damaged header."""
        path = self.document(place, "letter.txt", 20000)
        with self.start(place, path) as desk:
            desk.says("were read", 300)
            desk.quit()
        for what, at, size in [("pages", 0.2, 0.6), ("the header", 0, 0.0001)]:
            cache = self.caches(place)[0]
            data = bytearray(cache.read_bytes())
            begin = max(32, int(len(data) * at))  # behind what says that it is a cache
            for i in range(begin, begin + max(64, int(len(data) * size)), 16):
                data[i] ^= 0xFF
            cache.write_bytes(data)
            with self.start(place) as desk:
                if what == "the header":
                    wait("the library tells it", lambda: desk.row("^letter, Not read yet: what was saved cannot be used"), 30)
                desk.choose("^letter,")
                desk.ask(QUESTION)
                told = desk.says("The saved reading of “letter” was damaged, so it is read again", 60)
                print(f"  {what}: {told}")
                desk.says(f"^{re.escape(FACT)}$", 300)
                desk.quit()

    def another_model(self, place):
        """Two models read one document once each; a reading of another text is explained and read again."""
        path = self.document(place, "letter.txt", 4000)
        with self.start(place, path) as desk:
            desk.says("were read", 300)
            desk.quit()
        other = place / "other.gguf"
        data = bytearray((self.examples / "mini-reader-q8_0.gguf").read_bytes())
        for at in range(len(data) // 4, len(data), 1 << 16):  # of the weights
            data[at] ^= 1
        other.write_bytes(data)
        with self.start(place, model=other) as desk:
            desk.choose("^letter,")
            desk.says("were read", 300)
            desk.quit()
        both = {cache: cache.read_bytes() for cache in self.caches(place)}
        expect(len(both) == 2, f"readings: {both.keys()}")
        with self.start(place) as desk:
            desk.choose("^letter,")
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 120)
            desk.quit()
        now = {cache: cache.read_bytes() for cache in self.caches(place)}
        expect(both == now, "a reading was made anew")
        (place / "data" / "kvasir-desk" / "texts" / "letter.txt").write_text(f"{self.book[9000:11000]} {FACT} {self.book[11000:12000]}")
        with self.start(place, model=other) as desk:
            desk.choose("^letter,")
            desk.says("The saved reading of “letter” is of another text, so it is read again", 60)
            desk.says("were read", 300)
            desk.quit()

    def meanwhile(self, place):
        """A document is asked while another is read."""
        short, long = self.document(place, "short.txt", 6000), self.document(place, "long.txt", 200000, start=20000)
        with self.start(place, short) as desk:
            desk.says("were read", 300)
            desk.open(long)
            wait("the second reading", lambda: desk.row(r"^long, Reading \d"), 60)
            desk.choose("^short,")
            desk.ask(QUESTION)
            desk.says(f"^{re.escape(FACT)}$", 120)
            expect(desk.row(r"^long, Reading"), "the other document is not read any more")
            desk.quit()

    def closed(self, place):
        """Closing the window while it reads stops that, keeps what was read, and leaves nothing."""
        path = self.document(place, "long.txt", 300000)
        with self.start(place, path) as desk:
            desk.says(r"Reading [1-9][\d.]*%|Reading 0.[1-9]%", 120)
            began = time.monotonic()
            desk.press("^Close$")
            desk.ended(60)
            print(f"  ended after {time.monotonic() - began:.1f} s")
        self.leaves_nothing(place)
        expect(len(self.caches(place)) == 1, "what was read is not kept")
        with self.start(place) as desk:
            desk.choose("^long,")
            desk.says(r"The first [\d.]+% was read", 30)
            desk.quit()

    def no_model(self, place):
        """A model that cannot be opened is told, on a page of its own; the program ends as it should."""
        with self.start(place, model=place / "missing.gguf") as desk:
            wait("the library's message", lambda: any("missing.gguf" in label for label in desk.labels()), 30)
            expect(desk.find("push button", "Choose a Model"), "no model can be chosen")
            desk.quit()

    def kinds(self, place):
        """Markdown, PDF and old encodings are read; what is no text, empty, not there or too long is told."""
        (place / "notes.md").write_text(f"# Notes\n\n- {self.book[3000:4500]}\n- {FACT}\n- {self.book[4500:6000]}\n")
        (place / "old.txt").write_bytes(f"Café. {self.book[3000:4500]} {FACT} {self.book[4500:6000]}".encode("cp1252", "replace"))
        (place / "page.pdf").write_bytes(pdf(["To whom it may concern.", FACT, "With kind regards."]))
        for name, message in [("noise.txt", b"\x00\x01\x02" * 500), ("empty.txt", b" \n")]:
            (place / name).write_bytes(message)
        with self.start(place, place / "notes.md") as desk:
            for name in ["notes", "old", "page"]:
                if name != "notes":
                    desk.open(place / ("page.pdf" if name == "page" else "old.txt"))
                wait(f"{name} is chosen", lambda name=name: drive.name_of(desk.frame) == name, 60)
                desk.says("were read", 300)
                desk.ask(QUESTION)
                desk.says(f"^{re.escape(FACT)}$", 120)
            for name, why in [("noise.txt", "neither a text nor a PDF"), ("empty.txt", "it is empty"), ("gone.txt", "No such file")]:
                desk.open(place / name)
                wait(f"that {name} is told", lambda why=why: any(why in label for window in desk.windows() for label in desk.labels(window)), 30)
                desk.close_dialogs()
            expect(len(self.caches(place)) == 3, f"kept: {self.caches(place)}")
            desk.open(self.examples / "sherlock-holmes.txt")
            desk.says("tokens do not fit", 60)  # longer than the model's context
            desk.quit()

    def kept(self, place):
        """A text that is there is not read again under another name; documents are renamed and removed."""
        path = self.document(place, "letter.txt", 4000)
        with self.start(place, path) as desk:
            desk.says("were read", 300)
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
            expect([p.name for p in self.caches(place)] == ["Old Letter.kv"], f"kept: {self.caches(place)}")
            desk.act(desk.row("^Old Letter,"), "row.remove")
            desk.press_in_dialogs("Remove")
            wait("it is gone", lambda: not desk.row("^Old Letter,"), 30)
            expect(not self.caches(place) and not list((place / "data" / "kvasir-desk" / "texts").iterdir()), "its files are there")
            desk.quit()


def pdf(lines):
    """A PDF of one page."""
    text = "BT /F1 12 Tf 72 720 Td 16 TL " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
               "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
               f"<< /Length {len(text)} >>\nstream\n{text}\nendstream", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    data, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n"
    table = len(data)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n" + "".join(f"{place:010} 00000 n \n" for place in places)
    return (data + f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n").encode()


def main():
    drive.inside()
    cases = Cases(*sys.argv[1:3])
    names = sys.argv[3:] or ["no_model", "kinds", "kept", "answer_stopped", "damaged", "another_model", "stopped", "meanwhile", "closed", "demonstration"]
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
