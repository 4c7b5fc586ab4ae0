"""Opening, asking and closing over and over takes no more memory: leak_test.py [CYCLES]."""
import gc
import sys
import tempfile

from support import FACT, MODEL, QUESTION, document, kvasir

MOST_GROWTH = 24 << 20  # bytes: what allocators of several threads may keep; a session that leaks each time has 2 MB


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def trouble(*_):
    raise RuntimeError


def cycle(path):
    with kvasir.Model(MODEL, log=lambda *_: None) as model, model.load(path, threads=1) as session:
        answer = session.generate(QUESTION, lambda _: None, stop=["never"])
        assert answer.text == FACT, answer
        with session.stream(QUESTION, cancel=kvasir.Cancel()) as stream:
            next(stream)
        with session.fork() as fork:
            fork.next()
        for fail in (lambda: session.generate(QUESTION, trouble), lambda: model.load(path + ".missing"),
                     lambda: model.load(path, verify=True, progress=trouble)):
            try:
                fail()
            except (RuntimeError, kvasir.NotFound):
                continue
            raise AssertionError("nothing was raised")


def main():
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/document.kv"
        with kvasir.Model(MODEL) as model, model.session() as session:
            session.prefill(document(600))
            session.save(path)
        gc.disable()  # nothing may need it
        for _ in range(cycles // 4):
            cycle(path)
        before = resident()
        for _ in range(cycles):
            cycle(path)
        growth = resident() - before
    print(f"{cycles} cycles, resident memory {before} bytes, grown by {growth}")
    return growth > MOST_GROWTH


sys.exit(main())
