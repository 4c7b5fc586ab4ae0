#!/usr/bin/env python3
"""Compares the time of a token in Python with the same program in C.

    overhead.py MODEL.gguf [ROUNDS]

Both answer the same question over the same cache file by turns, in one thread, with a callback for
each piece. C is compiled against KVASIR_INCLUDE_DIR and KVASIR_LIB_DIR. Prints the minimum and the
median of the CPU time per token in microseconds, and the ratios.
"""
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import kvasir

TOKENS = 256
QUESTION = "Tell me all of it."
PROGRAM = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <kvasir.h>
static int32_t count_bytes(const char *text, size_t size, void *user) {
  (void)text;
  *(size_t *)user += size;
  return 0;
}
static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
int main(int count, char **values) {
  kv_model *model = NULL;
  kv_session *session = NULL;
  kv_error error;
  kv_session_options so;
  char line[512];
  (void)count;
  kv_init(&so, sizeof so);
  so.threads = 1;
  if (kv_open(values[1], NULL, NULL, &model, &error) ||
      kv_load(model, values[2], &so, NULL, &session, &error))
    return puts(error.message), 1;
  while (fgets(line, sizeof line, stdin)) {
    kv_generate_options go;
    kv_answer answer;
    size_t bytes = 0;
    int64_t begin = now();
    kv_init(&answer, sizeof answer);
    kv_init(&go, sizeof go);
    go.max_tokens = 256;
    go.temperature = 4;
    go.seed = 1;
    if (kv_generate(session, line, strcspn(line, "\n"), &go, NULL, count_bytes, &bytes, &answer,
                    &error))
      return puts(error.message), 1;
    printf("%llu %lld %llu\n", (unsigned long long)bytes, (long long)(now() - begin),
           (unsigned long long)answer.answer_tokens);
    fflush(stdout);
  }
  kv_session_close(session);
  kv_close(model);
  return 0;
}
"""


def compile_c(folder):
    """Compiles the program and returns its path."""
    source, program = pathlib.Path(folder, "ask.c"), pathlib.Path(folder, "ask")
    source.write_text(PROGRAM, encoding="utf-8")
    include, libraries = os.environ["KVASIR_INCLUDE_DIR"], os.environ["KVASIR_LIB_DIR"]
    link = [f"-L{libraries}", "-lkvasir", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["cc", "-O2", f"-I{include}", source, "-o", program, *link], check=True)
    return program


def main():
    model_path, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    book = pathlib.Path(model_path).parent / "sherlock-holmes.txt"
    with tempfile.TemporaryDirectory() as folder, kvasir.Model(model_path) as model:
        saved, program = folder + "/document.kv", compile_c(folder)
        with model.session(threads=1) as session:
            session.prefill(book.read_text(encoding="utf-8")[:2000])
            session.save(saved)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        c = subprocess.Popen([program, model_path, saved], **pipes)
        with model.load(saved, threads=1) as session:
            compare(c, session, rounds)
        c.communicate()


def compare(c, session, rounds):
    """Measures both programs by turns and prints the result."""
    in_c, in_python, ratios = [], [], []
    for i in range(rounds + 1):
        c.stdin.write(QUESTION + "\n")
        c.stdin.flush()
        size, nanoseconds, tokens = map(int, c.stdout.readline().split())
        pieces = []
        begin = time.process_time_ns()
        answer = session.ask(
            QUESTION,
            lambda piece: pieces.append(piece),
            max_tokens=TOKENS,
            temperature=4,
            seed=1,
        )
        spent = time.process_time_ns() - begin
        same = (len(answer.text.encode()), answer.answer_tokens) == (size, tokens)
        assert same, "another answer"
        if i:  # the first round reads the file
            in_c.append(nanoseconds / tokens / 1000)
            in_python.append(spent / tokens / 1000)
            ratios.append(in_python[-1] / in_c[-1])
    print(f"{tokens} tokens, {rounds} rounds, microseconds of CPU time per token:")
    for name, times in (("C", in_c), ("Python", in_python)):
        print(f"  {name}: minimum {min(times):.1f}, median {statistics.median(times):.1f}")
    ratio = min(in_python) / min(in_c)
    print(f"  Python / C: minimum {ratio:.4f}, median of pairs {statistics.median(ratios):.4f}")


main()
