"""Draws the pictures of the README: screenshots.py PROGRAM EXAMPLES FOLDER [DEMO.kv].

Needs ImageMagick and the font Cantarell. Prefills demo.txt, which takes minutes, unless DEMO.kv is
the cache file of `tools/demo --long`. Then prefills a part of a longer book.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import drive
from drive import Desk, wait


def shoot(path):
    time.sleep(3)  # animations end
    options = "-window root -crop 1190x750+5+5 +repage -strip +dither -colors 96"
    subprocess.run(["import", *options.split(), str(path)], check=True)


def main():
    drive.inside()
    program, examples, folder = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    with tempfile.TemporaryDirectory(prefix="desk-") as name:
        place = pathlib.Path(name)
        settings = place / "config" / "gtk-4.0"
        settings.mkdir(parents=True)
        (settings / "settings.ini").write_text("[Settings]\ngtk-font-name=Cantarell 11\n")
        book = place / "Sherlock Holmes.txt"
        text = (examples / "sherlock-holmes.txt").read_text()
        book.write_text(text[:400000])  # the whole is too long for the bundled model
        if len(sys.argv) > 4:
            model = pathlib.Path(sys.argv[4]).read_bytes()[32:40].hex()  # docs/file-format.md
            files = {f"caches/{model}/demo.kv": sys.argv[4],
                     "texts/demo.txt": examples / "demo.txt"}
            for name, source in files.items():
                path = place / "data" / "kvasir-desk" / name
                path.parent.mkdir(parents=True)
                shutil.copyfile(source, path)
        with Desk(program, place, examples / "demo.txt") as desk:
            desk.says("^Ready", 1800)
            desk.open(book)
            desk.says(r"Prefilling [1-9][\d.]*% · about", 600)
            shoot(folder / "prefill.png")
            desk.choose("^demo,")
            desk.ask("What is the access code of the north gate?")
            desk.says(r"4821907\.$", 120)
            time.sleep(3)
            desk.press_passage(wait("passages", desk.passages)[0])
            shoot(folder / "answer.png")
            desk.quit()


main()
