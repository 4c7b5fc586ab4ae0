#!/usr/bin/env python3
"""Stands for llama.cpp's llama-bench: the same options, and the same fields with -o json.

FAKE_LLAMA_BENCH says how it fails: exit, signal, no-json, empty, unknown-option, model, no-depth,
hang, endless; or that it leaves a program behind, which has its output: behind. FAKE_PROCESS is the
file for the process number of hang and behind.
"""

import json
import os
import signal
import subprocess
import sys
import time

how = os.environ.get("FAKE_LLAMA_BENCH", "")
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
known = {"-m", "-t", "-ngl", "-fa", "-p", "-n", "-d", "-r", "-o", "-ub", "-ctk", "-ctv"}
for name in sys.argv[1::2]:
    if name not in known or (how == "unknown-option" and name == "-d"):
        print(f"error: invalid parameter for argument: {name}", file=sys.stderr)
        print("usage: llama-bench [options]")
        sys.exit(1)
print("load_backend: loaded CPU backend", file=sys.stderr)
if how == "exit":
    print("ggml_abort: the device is lost", file=sys.stderr)
    sys.exit(3)
if how in ("hang", "behind"):
    process = os.getpid()
    if how == "behind":
        process = subprocess.Popen(["sleep", "600"]).pid
    with open(os.environ["FAKE_PROCESS"], "w", encoding="ascii") as file:
        file.write(f"{process}\n")
if how == "hang":
    time.sleep(600)
while how == "endless":
    print("x" * 65536)
if how == "signal":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "model":
    print(f"main: error: failed to load model '{options['-m']}'", file=sys.stderr)
    sys.exit(1)
if how == "no-json":
    print("| model | size | params | backend | threads | test | t/s |")
    sys.exit(0)
if how == "empty":
    print("[]")
    sys.exit(0)


def test(n_prompt, n_gen, n_depth, speed):
    fields = {
        "build_commit": "d32676d",
        "build_number": 7062,
        "cpu_info": "a CPU",
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": options["-m"],
        "model_type": "llama 1B Q8_0",
        "model_size": 1,
        "model_n_params": 1,
        "n_batch": 2048,
        "n_ubatch": int(options.get("-ub", "512").split(",")[0]),
        "n_threads": int(options["-t"]),
        "type_k": options.get("-ctk", "f16"),
        "type_v": options.get("-ctv", "f16"),
        "n_gpu_layers": int(options["-ngl"]),
        "flash_attn": options["-fa"] == "1",
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "test_time": "2026-11-27T00:00:00Z",
        "avg_ns": int(1e9 * max(n_prompt, n_gen) / speed),
        "stddev_ns": 0,
        "avg_ts": speed,
        "stddev_ts": 0.0,
        "samples_ns": [int(1e9 * max(n_prompt, n_gen) / speed)],
        "samples_ts": [speed],
    }
    if how == "no-depth":
        del fields["n_depth"]
    return fields


tests = []
for depth in map(int, options["-d"].split(",")):
    for _ in options.get("-ub", "512").split(","):
        if int(options["-p"]):
            tests.append(test(int(options["-p"]), 0, depth, 1000.0 / (1 + depth)))
        if int(options["-n"]):
            tests.append(test(0, int(options["-n"]), depth, 10.0 / (1 + depth)))
print(json.dumps(tests, indent=2))
