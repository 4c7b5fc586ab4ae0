"""Cycles of open, ask and close keep no memory and no file: leak_test.py [CYCLES]."""
import gc
import os
import sys
import tempfile

from support import FACT, MODEL, QUESTION, document, kvasir

MAX_GROWTH = 6 << 20  # bytes that allocators keep; a leak of 7 kB a cycle is more in 1,000 cycles


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def open_files():
    return len(os.listdir("/proc/self/fd"))


def trouble(*_):
    raise RuntimeError


def cycle(path):
    with kvasir.Model(MODEL, log=lambda *_: None) as model:
        decode = kvasir.Strategy("bounded", budget_fraction=0.05)
        with model.load(path, threads=1, decode=decode) as session:
            answer = session.ask(QUESTION, lambda _: None, stop=["never"], trace_passages=True)
            assert answer.text == FACT and session.passages(), answer
            for _ in session.stream(QUESTION, cancel=kvasir.Cancel()):
                break
            with session.fork() as fork:
                fork.next()
            for fail in (
                lambda: session.ask(QUESTION, trouble),
                lambda: model.load(path + ".missing"),
                lambda: model.load(path, verify=True, progress=trouble),
            ):
                try:
                    fail()
                except (RuntimeError, kvasir.NotFoundError):
                    continue
                raise AssertionError("nothing was raised")


def main():
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/document.kv"
        with kvasir.Model(MODEL) as model, model.session() as session:
            session.prefill(document(600))
            session.save(path)
        gc.disable()  # reference counts alone free everything
        seen, tenth = [], cycles // 10
        for i in range(cycles):
            cycle(path)
            seen.append(resident())
            if i + 1 == tenth:
                files = open_files()
    # Caches of allocators vary, so the minimum counts. The first tenth fills them.
    before, after = min(seen[tenth : 2 * tenth]), min(seen[-tenth:])
    print(
        f"{cycles} cycles: at least {before} bytes resident after the first tenth, {after} in the "
        f"last; {files} and {open_files()} open files"
    )
    return after - before > MAX_GROWTH or files != open_files()


sys.exit(main())
