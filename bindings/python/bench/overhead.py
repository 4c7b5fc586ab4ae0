#!/usr/bin/env python3
"""What a token costs in Python beside the same program in C: overhead.py MODEL.gguf [ROUNDS]

Both answer the same question over the same saved document by turns, in one thread, with a callback for each piece. C is compiled against KVASIR_INCLUDE_DIR
and KVASIR_LIB_DIR. Prints the least and the median microseconds a token, and the ratios.
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
PROGRAM = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <kvasir.h>
static int32_t take(const char *text, size_t size, void *user) { (void)text; *(size_t *)user += size; return 0; }
int main(int count, char **values) {
  kv_model *model = NULL; kv_session *session = NULL; kv_error error; char line[512]; (void)count;
  kv_session_options so; kv_session_options_init(&so, sizeof so); so.threads = 1;
  if (kv_open(values[1], NULL, &model, &error) || kv_load(model, values[2], &so, NULL, &session, &error)) return puts(error.message), 1;
  while (fgets(line, sizeof line, stdin)) {
    kv_generate_options go; kv_answer answer = {sizeof answer}; size_t bytes = 0; struct timespec begin, end;
    kv_generate_options_init(&go, sizeof go); go.max_tokens = 256; go.temperature = 4; go.seed = 1;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    if (kv_generate(session, line, strcspn(line, "\n"), &go, take, &bytes, &answer, &error)) return puts(error.message), 1;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    printf("%llu %lld %llu\n", (unsigned long long)bytes, (end.tv_sec - begin.tv_sec) * 1000000000LL + end.tv_nsec - begin.tv_nsec,
           (unsigned long long)answer.answer_tokens);
    fflush(stdout);
  }
  kv_session_close(session); kv_close(model); return 0;
}
"""


def main():
    model_path, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    text = (pathlib.Path(model_path).parent / "sherlock-holmes.txt").read_text(encoding="utf-8")[:2000]
    with tempfile.TemporaryDirectory() as folder:
        saved, source, program = folder + "/document.kv", folder + "/ask.c", folder + "/ask"
        pathlib.Path(source).write_text(PROGRAM, encoding="utf-8")
        libraries = os.environ["KVASIR_LIB_DIR"]
        subprocess.run(["cc", "-O2", f"-I{os.environ['KVASIR_INCLUDE_DIR']}", source, "-o", program, f"-L{libraries}", "-lkvasir",
                        f"-Wl,-rpath,{libraries}"], check=True)
        with kvasir.Model(model_path) as model, model.session(threads=1) as session:
            session.prefill(text)
            session.save(saved)
        c = subprocess.Popen([program, model_path, saved], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with kvasir.Model(model_path) as model, model.load(saved, threads=1) as session:
            compare(c, session, rounds)
        c.communicate()


def compare(c, session, rounds):
    in_c, in_python, ratios = [], [], []
    for i in range(rounds + 1):
        c.stdin.write("Tell me all of it.\n")
        c.stdin.flush()
        size, nanoseconds, tokens = map(int, c.stdout.readline().split())
        pieces = []
        begin = time.process_time_ns()
        answer = session.generate("Tell me all of it.", lambda piece: pieces.append(piece), max_tokens=TOKENS, temperature=4, seed=1)
        spent = time.process_time_ns() - begin
        assert (len(answer.text.encode()), answer.answer_tokens) == (size, tokens), "another answer"
        if i:  # the first one reads the file
            in_c.append(nanoseconds / tokens / 1000)
            in_python.append(spent / tokens / 1000)
            ratios.append(in_python[-1] / in_c[-1])
    print(f"{tokens} tokens, {rounds} rounds, microseconds of processor time a token: C least {min(in_c):.1f}, median {statistics.median(in_c):.1f}; "
          f"Python least {min(in_python):.1f}, median {statistics.median(in_python):.1f}")
    print(f"Python / C: of the least {min(in_python) / min(in_c):.4f}, median of pairs {statistics.median(ratios):.4f}")


main()
