#!/usr/bin/env python3
"""Trains a small reader and writes its weights: needs PyTorch and a GPU.

    train.py {gemma3|qwen35} --corpus FOLDER --tokenizer MODEL.gguf --out FOLDER --seconds 1200

FOLDER of the corpus holds plain text, *.txt. A reader learns to answer questions about the document
before them, at growing lengths. --from FOLDER goes on with the weights of an earlier run.
write_gguf.py makes a model of them.
"""

import argparse
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from documents import TASKS, Documents, corpus_of, tokenizer_of
from reader import SHAPES, Reader

# (tokens of a document, documents of a step, share of the time)
STAGES = [(2048, 64, 0.40), (8192, 24, 0.30), (32768, 6, 0.30)]
STAGES_FROM = [(8192, 24, 0.35), (32768, 6, 0.65)]
RATE, RATE_FROM = 3e-3, 1.5e-3


class Samples(torch.utils.data.IterableDataset):
    def __init__(self, corpus, tokenizer, tokens, seed):
        self.corpus, self.tokenizer, self.tokens, self.seed = corpus, tokenizer, tokens, seed

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        documents = Documents(
            self.corpus, self.tokenizer, self.seed * 1000 + (worker.id if worker else 0)
        )
        while True:
            yield documents.sample(self.tokens)


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


def save(model, folder):
    """weights.N.npz of at most 15 MB each, float16."""
    for old in folder.glob("weights.*.npz"):
        old.unlink()
    parts, size = [{}], 0
    for name, value in model.tensors().items():
        array = value.detach().half().cpu().numpy()
        if size + array.nbytes > 14e6:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    for number, part in enumerate(parts):
        np.savez(folder / f"weights.{number}.npz", **part)


@torch.no_grad()
def load(model, folder):
    tensors = model.tensors()
    for path in sorted(folder.glob("weights.*.npz")):
        with np.load(path) as arrays:
            for name in arrays.files:
                tensors[name].copy_(torch.tensor(arrays[name].astype(np.float32)))


def optimizers(model):
    def by_adam(name):
        return "embd" in name or "conv1d" in name

    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and not by_adam(n)]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or by_adam(n)]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(done, goes_on):
    """Of the part `done` of the time: a short rise, then a long fall."""
    rises = min(1.0, done / 0.02)
    falls = max(0.03, 1 - done) if goes_on else min(1.0, max(0.03, (1 - done) / 0.45))
    return (RATE_FROM if goes_on else RATE) * rises * falls


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("architecture", choices=SHAPES)
    parser.add_argument("--corpus", type=pathlib.Path, required=True)
    parser.add_argument("--held", type=pathlib.Path, help="folder of texts to evaluate on")
    parser.add_argument("--tokenizer", required=True, help="GGUF file that has it")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--from", dest="start", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=float, default=1, help="factor of the documents of a step")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)

    tokenizer = tokenizer_of(a.tokenizer)
    corpus = corpus_of(a.corpus, tokenizer)
    held = Documents(corpus_of(a.held, tokenizer) if a.held else corpus, tokenizer, 777)
    print(f"{len(corpus.ids):,} tokens of text", flush=True)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Reader(SHAPES[a.architecture]).to(a.device)
    if a.start:
        load(model, a.start)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    steps = optimizers(model)
    stages = STAGES_FROM if a.start else STAGES
    begin = time.monotonic()
    for number, (tokens, documents, share) in enumerate(stages):
        documents = max(1, int(documents * a.batch))
        samples = Samples(corpus, tokenizer, tokens, number + (100 if a.start else 1))
        batches = iter(
            torch.utils.data.DataLoader(samples, batch_size=documents, num_workers=a.workers)
        )
        compiled = torch.compile(model, dynamic=False) if a.device == "cuda" else model
        stage, step = time.monotonic(), 0
        while time.monotonic() - stage < share * a.seconds:
            done = min(1.0, (time.monotonic() - begin) / a.seconds)
            for group in (g for o in steps for g in o.param_groups):
                group["lr"] = rate(done, bool(a.start)) * (0.7 if tokens > 30000 else 1)
            ids, mask = (x.to(a.device).long() for x in next(batches))
            with torch.autocast(a.device, torch.bfloat16):
                loss, text, answers = compiled(ids[:, :-1], ids[:, 1:], mask[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if step in (1, 5) or step % max(1, 400000 // tokens) == 0:
                speed = step * documents * tokens / (time.monotonic() - stage) / 1000
                print(
                    f"{time.monotonic() - begin:.0f} s: {tokens} tokens, step {step}, "
                    f"text {text.item():.3f}, answers {answers.item():.3f}, {speed:.0f}k tokens/s",
                    flush=True,
                )
        for n in (2048, 8192, 32768):
            if n <= tokens:
                print(f"{n} tokens: {evaluate(model, held, n, 4, a.device)}", flush=True)
        save(model, a.out)
    print(f"{time.monotonic() - begin:.0f} s: weights are in {a.out}", flush=True)


if __name__ == "__main__":
    main()
