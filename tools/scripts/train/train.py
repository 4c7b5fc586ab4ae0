#!/usr/bin/env python3
"""Trains a small reader and writes its weights: needs PyTorch and a GPU.

    documents.py FOLDER TOKENIZER.gguf CORPUS.npz
    train.py {gemma3|qwen35} --corpus CORPUS.npz --tokenizer MODEL.gguf --out FOLDER --seconds 1200

FOLDER of the corpus holds plain text, *.txt. A reader learns to answer questions about the document
before them, at growing lengths. A run may be cut into calls: --seconds is of all calls, --for of
this one, --state FOLDER keeps what the next call goes on with, and --from FOLDER goes on with
weights alone. Several GPUs: torchrun --nproc-per-node=N train.py ...; each takes a part of a step's
documents. write_gguf.py makes a model of the weights.
"""

import argparse
import os
import pathlib
import time

BEGIN = time.monotonic()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import forms  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from documents import TASKS, Documents, corpus_of, tokenizer_of  # noqa: E402
from muon import Muon  # noqa: E402
from reader import SHAPES, Reader  # noqa: E402

# (tokens of a document, documents of a step, share of the time)
STAGES = [(1024, 64, 0.12), (2048, 40, 0.38), (8192, 12, 0.27), (32768, 4, 0.23)]
RATE = 3e-3
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


class Samples(torch.utils.data.IterableDataset):
    def __init__(self, corpus, tokenizer, tokens, seed):
        self.corpus, self.tokenizer, self.tokens, self.seed = corpus, tokenizer, tokens, seed

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        seed = f"{self.seed} {RANK} {worker.id if worker else 0}"
        documents = Documents(self.corpus, self.tokenizer, seed)
        while True:
            yield documents.sample(self.tokens)


def batches(samples, documents, workers, device):
    loader = torch.utils.data.DataLoader(
        samples,
        batch_size=documents,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device == "cuda",
    )
    for ids, mask in loader:
        yield ids.to(device, non_blocking=True).long(), mask.to(device, non_blocking=True).long()


def agreement(model, x, h, places, device):
    """Whether the MTP layer predicts what the model does, for each of `places`."""
    with torch.autocast(device, torch.bfloat16):
        next_h = model.hidden_of_next(h[None, :-1], x[:, 1:])[0]
    weight = model.token_embd.weight
    wanted = F.linear(h[places].float(), weight).argmax(-1)
    return (F.linear(next_h[places - 1].float(), weight).argmax(-1) == wanted).cpu().numpy()


@torch.no_grad()
def evaluate(model, documents, tokens, count, device):
    """Percentage of answers whose tokens are all the most likely ones, by task. "mtp": of tokens of
    answers for which the MTP layer has the same most likely token as the model."""
    result, agreed = {}, []
    for task in TASKS:
        right = total = 0
        for _ in range(count):
            ids, mask = documents.sample(tokens, task, 12)
            x = torch.tensor(ids[None, :-1].astype(np.int64), device=device)
            with torch.autocast(device, torch.bfloat16):
                h = model.hidden(x)[0]
            places = np.flatnonzero(mask[1:])
            if len(places) == 0:
                continue
            logits = F.linear(h[places].float(), model.token_embd.weight)
            hits = logits.argmax(-1).cpu().numpy() == ids[1:][places]
            for answer in np.split(hits, np.flatnonzero(np.diff(places) > 1) + 1):
                right, total = right + bool(answer.all()), total + 1
            if model.shape.get("mtp"):
                agreed.append(agreement(model, x, h, places[places > 0], device))
        result[task] = round(100 * right / max(total, 1), 1)
    if agreed:
        result["mtp"] = round(100 * float(np.concatenate(agreed).mean()), 1)
    return result


# ---- weights and state --------------------------------------------------------------------------


def save(model, folder, progress):
    """weights.N.npz of at most 15.5 MB each, float16; `progress` is in the first."""
    parts, size = [{"progress": np.float64(progress)}], 0
    for name, value in model.tensors().items():
        array = value.detach().half().cpu().numpy()
        if size + array.nbytes > 15.5e6:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    for number, part in enumerate(parts):
        new = folder / f"weights.{number}.new"
        with open(new, "wb") as file:
            np.savez(file, **part)
        new.replace(folder / f"weights.{number}.npz")


@torch.no_grad()
def load(model, folder):
    """Returns the progress, in seconds."""
    tensors, progress = model.tensors(), 0.0
    paths = sorted(folder.glob("weights.*.npz"))
    if not paths:
        raise SystemExit(f"no weights.*.npz in {folder}")
    for path in paths:
        with np.load(path) as arrays:
            for name in arrays.files:
                if name == "progress":
                    progress = float(arrays[name])
                else:
                    tensors[name].copy_(torch.tensor(arrays[name].astype(np.float32)))
    return progress


def save_state(model, optimizers, folder, progress, chosen):
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "progress": progress,
        "forms": chosen,
    }
    torch.save(state, folder / "state.new")
    (folder / "state.new").replace(folder / "state.pt")


def optimizers_of(model, device):
    def by_adam(name):
        return "embd" in name or "conv1d" in name

    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and not by_adam(n)]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or by_adam(n)]
    return [
        Muon(matrices, lr=RATE),
        torch.optim.AdamW(
            others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
        ),
    ]


# ---- training -----------------------------------------------------------------------------------


def stage_of(done):
    """The stage at the part `done` of the time."""
    for number, (_, _, share) in enumerate(STAGES):
        done -= share
        if done < 0:
            return number
    return len(STAGES) - 1


def rate(done, since_start):
    """Of the part `done` of the time: a short rise, also after a new start, then a long fall."""
    rises = min(1.0, max(0.02, done / 0.02), (since_start + 1) / 50)
    return RATE * rises * min(1.0, max(0.02, (1 - done) / 0.5))


def share_gradients(model):
    """Makes each gradient the mean of all GPUs'."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= RANKS
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(part.view_as(g))


class Run:
    def __init__(self, a):
        self.a = a
        self.device = a.device
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if RANKS > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo")
        self.tokenizer = tokenizer_of(a.tokenizer)
        self.corpus = corpus_of(a.corpus, self.tokenizer)
        held = corpus_of(a.held, self.tokenizer) if a.held else self.corpus
        self.held = Documents(held, self.tokenizer, 777)
        say(f"{len(self.corpus.ids):,} tokens of text")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.model = Reader(SHAPES[a.architecture]).to(self.device)
        self.optimizers = optimizers_of(self.model, self.device)
        say(f"{sum(p.numel() for p in self.model.parameters()):,} parameters")
        self.before = 0.0  # seconds of earlier calls
        self.chosen = dict(form.split("=") for form in a.forms)
        self.restore()
        self.choose_forms()
        if self.device == "cuda":
            torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.accumulated_recompile_limit = 4096
            self.model.compile_parts()
        self.saved = time.monotonic()

    def restore(self):
        path = self.a.state and self.a.state / "state.pt"
        if path and path.exists():
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(kept)
            self.before, self.chosen = state["progress"], state["forms"] | self.chosen
        elif self.a.start:
            self.before = load(self.model, self.a.start)
        if self.a.last:
            self.a.seconds = self.before + self.a.lasts
        say(f"goes on at {self.before:.0f} s of {self.a.seconds:.0f} s")

    def choose_forms(self):
        part = "window" if self.a.architecture == "gemma3" else "delta"
        if self.device != "cuda":
            return
        if RANK == 0:
            self.chosen[part] = forms.choose(part, self.chosen.get(part))
        if RANKS > 1:
            names = [self.chosen.get(part)]
            dist.broadcast_object_list(names, 0, device=torch.device("cpu"))
            forms.choose(part, names[0])

    def progress(self):
        """Seconds of all calls, the same on all GPUs."""
        now = torch.tensor([self.before + time.monotonic() - BEGIN], dtype=torch.float64)
        if RANKS > 1:
            dist.broadcast(now, 0)
        return now.item()

    def save(self, progress):
        if RANK == 0:
            if self.a.state:
                save_state(self.model, self.optimizers, self.a.state, progress, self.chosen)
            save(self.model, self.a.out, progress)
        self.saved = time.monotonic()

    def step(self, ids, mask):
        with torch.autocast(self.device, torch.bfloat16):
            loss, text, answers = self.model(ids[:, :-1], ids[:, 1:], mask[:, 1:])
        loss.backward()
        if RANKS > 1:
            share_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return text, answers

    @staticmethod
    def check(values):
        if not all(torch.isfinite(x).item() for x in values):
            raise SystemExit("a loss is not finite: continue from the last state that was saved")

    def report(self, tokens, step, since, values):
        text, answers = (x.item() for x in values)
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0
        say(
            f"{self.before + time.monotonic() - BEGIN:.0f} s: {tokens} tokens, step {step}, "
            f"text {text:.3f}, answers {answers:.3f}, "
            f"{since / 1000:.0f}k tokens/s, {memory:.1f} GiB"
        )

    def stage(self, number):
        """Trains until the stage or the call ends; returns the progress."""
        tokens, documents, _ = STAGES[number]
        documents = max(1, round(documents * self.a.batch / RANKS))
        samples = Samples(self.corpus, self.tokenizer, tokens, f"{number} {self.before:.0f}")
        feed = batches(samples, documents, self.a.workers, self.device)
        marks, step, end, values = [], 0, self.before + self.a.lasts, ()
        mark, marked = time.monotonic(), 0
        while True:
            progress = self.progress()
            done = progress / self.a.seconds
            ends = progress >= end or done >= 1 or stage_of(done) != number
            if step == self.a.steps if self.a.steps else ends:
                self.check(values)
                return progress
            for group in (g for o in self.optimizers for g in o.param_groups):
                group["lr"] = rate(done, self.steps) * (0.7 if tokens > 30000 else 1)
            try:
                values = self.step(*next(feed))
            except torch.OutOfMemoryError:  # fewer documents, for the rest of the stage
                if RANKS > 1 or documents == 1:
                    raise
                self.model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                documents //= 2
                say(f"out of memory: a step has {documents} documents now")
                feed = batches(samples, documents, self.a.workers, self.device)
                continue
            step, self.steps = step + 1, self.steps + 1
            if self.device == "cuda":  # at most two steps ahead of the GPU
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 2:
                    marks.pop(0).synchronize()
            if step in (1, 3) or time.monotonic() - mark > 10:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                now = time.monotonic()
                speed = (step - marked) * documents * RANKS * tokens / (now - mark)
                self.report(tokens, step, speed, values)
                mark, marked = now, step
            if time.monotonic() - self.saved > self.a.save_every:
                self.check(values)
                self.save(progress)

    def evaluate(self, longest):
        if RANK == 0:
            for tokens in (2048, 8192, 32768):
                if tokens <= longest:
                    with torch.compiler.set_stance("force_eager"):
                        found = evaluate(self.model, self.held, tokens, 4, self.device)
                    say(f"{tokens} tokens: {found}")

    def train(self):
        self.steps, end = 0, self.before + self.a.lasts
        progress = self.progress()
        stages = iter(range(len(STAGES)) if self.a.steps else ())
        while progress < min(end, self.a.seconds):
            number = next(stages, None) if self.a.steps else stage_of(progress / self.a.seconds)
            if number is None:
                break
            progress = self.stage(number)
            self.save(progress)
            self.evaluate(min(STAGES[number][0], self.a.longest))
            progress = self.progress()
        self.save(progress)
        say(f"{progress:.0f} s: weights are in {self.a.out}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("architecture", choices=SHAPES)
    parser.add_argument("--corpus", type=pathlib.Path, required=True)
    parser.add_argument("--held", type=pathlib.Path, help="corpus to evaluate on")
    parser.add_argument("--tokenizer", required=True, help="GGUF file that has it")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--state", type=pathlib.Path, help="folder for the next call")
    parser.add_argument("--from", dest="start", type=pathlib.Path, help="folder of weights")
    parser.add_argument("--seconds", type=float, default=1200, help="of all calls")
    parser.add_argument("--for", dest="lasts", type=float, default=1e9, help="seconds of this call")
    parser.add_argument("--last", action="store_true", help="--seconds end with this call")
    parser.add_argument("--save-every", type=float, default=60)
    parser.add_argument("--workers", type=int, default=8, help="processes that make documents")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=float, default=1, help="factor of the documents of a step")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of an evaluation")
    parser.add_argument("--stages", help="TOKENS:DOCUMENTS:SHARE,... in place of the usual ones")
    parser.add_argument("--steps", type=int, help="of each stage, in place of its share of time")
    parser.add_argument("--forms", nargs="*", default=[], help="window=NAME, delta=NAME: forms.py")
    return parser.parse_args()


def main():
    a = arguments()
    if a.stages:
        STAGES[:] = [
            (int(t), int(d), float(s)) for t, d, s in (x.split(":") for x in a.stages.split(","))
        ]
    for folder in (a.out, a.state):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    Run(a).train()
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
