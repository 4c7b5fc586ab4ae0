"""Attention in a window and the gated delta rule: in plain PyTorch, and in forms that are faster on
a GPU. `choose` measures the forms, and takes the fastest whose outputs and gradients agree with
plain PyTorch's.

    forms.py {window|delta} [FORM]      prints the form's name, milliseconds and worst error
"""

import fcntl
import importlib
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

# ---- attention in a window ----------------------------------------------------------------------


def attend_window(q, k, v, window):
    """Attention in which a query sees the `window` newest tokens, itself included: blocks of
    `window` queries, each with its own block of keys and the one before."""
    batch, heads, tokens, dim = q.shape
    blocks = -(-tokens // window)
    rest = blocks * window - tokens
    q = F.pad(q, (0, 0, 0, rest)).view(batch, heads, blocks, window, dim)

    def with_previous(x):
        x = F.pad(x, (0, 0, window, rest)).view(batch, heads, blocks + 1, window, dim)
        return torch.cat((x[:, :, :-1], x[:, :, 1:]), 3)

    def by_block(x):
        return x.transpose(1, 2).reshape(batch * blocks, heads, -1, dim)

    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device)[None, :] - window
    near = (j <= i) & (i - j < window)
    first = near & (j >= 0)
    mask = torch.cat((first[None], near[None].expand(blocks - 1, -1, -1)))
    mask = mask[None].expand(batch, -1, -1, -1).reshape(batch * blocks, 1, window, 2 * window)
    out = F.scaled_dot_product_attention(
        by_block(q), by_block(with_previous(k)), by_block(with_previous(v)), attn_mask=mask
    )
    out = out.view(batch, blocks, heads, window, dim).transpose(1, 2)
    return out.reshape(batch, heads, blocks * window, dim)[:, :, :tokens]


@torch.compiler.disable
def attend_window_flash(q, k, v, window):
    tokens = q.size(2)
    q, k, v = (x.transpose(1, 2).bfloat16() for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, tokens, tokens, 0.0, True, False,
        window_size_left=window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return out.transpose(1, 2)


# ---- the gated delta rule -----------------------------------------------------------------------


@torch.compiler.disable
def delta_rule(q, k, v, log_decay, beta, chunk=64):
    """The gated delta rule in chunks: q, k, v [batch, tokens, heads, n]; log_decay and beta [batch,
    tokens, heads]. For each token M = exp(log_decay) M, M += k beta (v - M^T k), out = M^T q."""
    tokens, dim = q.size(1), q.size(-1)

    def in_chunks(x):  # [batch, heads, chunks, chunk, ...]
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -tokens % chunk)).transpose(1, 2).float()
        return x.unflatten(2, (-1, chunk))

    with torch.autocast(q.device.type, enabled=False):
        q, k, v, log_decay, beta = (in_chunks(x) for x in (q, k, v, log_decay, beta))
        decay = log_decay.cumsum(-1)
        ratio = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        system = (beta[..., None] * (k @ k.transpose(-1, -2)) * ratio).tril(-1)
        system = system + torch.eye(chunk, device=q.device)
        right = torch.cat((v, k * decay.exp()[..., None]), -1) * beta[..., None]
        u, w = torch.linalg.solve_triangular(system, right, upper=False).tensor_split((dim,), -1)
        own = (q @ k.transpose(-1, -2)) * ratio
        q, last = q * decay.exp()[..., None], decay[..., -1:]
        k = k * (last - decay).exp()[..., None]
        state = q.new_zeros(q.size(0), q.size(1), dim, dim)
        out = []
        for i in range(q.size(2)):
            new = u[:, :, i] - w[:, :, i] @ state
            out.append(q[:, :, i] @ state + own[:, :, i] @ new)
            state = state * last[:, :, i, :, None].exp() + k[:, :, i].transpose(-1, -2) @ new
        return torch.cat(out, 2)[:, :, :tokens].transpose(1, 2)


def fla(module):
    """A module of flash-linear-attention, whose kernels get at most three configurations each to
    choose from: to compile all of them takes minutes."""
    from triton.runtime.autotuner import Autotuner

    if "fla" not in sys.modules:
        init = Autotuner.__init__

        def thinned(self, fn, names, configurations, *rest, **named):
            some = configurations[:: -(-len(configurations) // 3)] if configurations else None
            init(self, fn, names, some, *rest, **named)

        Autotuner.__init__ = thinned
        importlib.import_module("fla.ops")
        Autotuner.__init__ = init
    return importlib.import_module(module)


def delta_rule_gated(q, k, v, log_decay, beta):
    """By flash-linear-attention's kernels. Triton 3.4 to 3.7.0 gets a backward kernel wrong with
    tiles of 64 on Hopper, so the kernel gets tiles of 32."""
    tiles = fla("fla.ops.common.chunk_o")
    if not tiles.TRITON_ABOVE_3_7_1:
        tiles.TRITON_ABOVE_3_7_1 = True
        tiles.check_shared_mem = lambda *_: False
    rule = fla("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return rule(q, k, v, log_decay.float(), beta.float(), scale=1.0)[0]


def delta_rule_by_channel(q, k, v, log_decay, beta):
    """By flash-linear-attention's rule with a decay for each channel: slower, but sound there."""
    rule = fla("fla.ops.kda").chunk_kda
    decay = log_decay.float()[..., None].expand(q.shape).contiguous()
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return rule(q, k, v, decay, beta.float(), scale=1.0)[0]


delta_rule_gated = torch.compiler.disable(delta_rule_gated)
delta_rule_by_channel = torch.compiler.disable(delta_rule_by_channel)

# ---- the choice ---------------------------------------------------------------------------------

KNOWN = {
    "window": {"plain": attend_window, "flash": attend_window_flash},
    "delta": {
        "plain": delta_rule,
        "gated": delta_rule_gated,
        "by-channel": delta_rule_by_channel,
    },
}
FORMS = {part: forms["plain"] for part, forms in KNOWN.items()}  # what reader.py calls
MOST_ERROR = 0.05  # of the norm of an output or a gradient; bfloat16 gives about 0.01


def inputs_of(part, batch, tokens, device):
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, device=device, generator=generator)

    if part == "window":
        inputs = [normal(batch, 6, tokens, 64).bfloat16() for _ in range(3)]
        rest = (512,)
    else:
        q, k, v = (normal(batch, tokens, 6, 64) for _ in range(3))
        decay = -normal(batch, tokens, 6).exp() * torch.tensor(
            [0.001, 0.01, 0.05, 0.2, 1, 4], device=device
        )
        inputs = [F.normalize(q, dim=-1) / 8, F.normalize(k, dim=-1), v, decay]
        inputs, rest = [*inputs, normal(batch, tokens, 6).sigmoid()], ()
    return [x.requires_grad_() for x in inputs], rest, normal(*inputs[2].shape)


def results(form, part, batch, tokens, device):
    inputs, rest, gradient = inputs_of(part, batch, tokens, device)
    out = form(*inputs, *rest)
    out.backward(gradient.to(out.dtype))
    return [out.detach().float()] + [x.grad.float() for x in inputs]


def worst(found, exact):
    """Of the errors of outputs and gradients, as parts of their norms."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact))


def milliseconds(form, part, device):
    inputs, rest, gradient = inputs_of(part, 8, 8192, device)

    def passes(count):
        for _ in range(count):
            out = form(*inputs, *rest)
            out.backward(gradient.to(out.dtype))
        torch.cuda.synchronize()

    passes(2)
    with open(pathlib.Path(tempfile.gettempdir()) / "forms.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process measures at a time
        begin = time.monotonic()
        passes(3)
        return (time.monotonic() - begin) / 3 * 1000


def measure(part, name, device):
    plain, form, error = KNOWN[part]["plain"], KNOWN[part][name], 0.0
    for shape in ((2, 2048), (3, 4096 + 64))[: 2 if device == "cuda" else 1]:
        wanted = results(plain, part, *shape, device)
        error = max(error, worst(results(form, part, *shape, device), wanted))
    took = milliseconds(form, part, device) if device == "cuda" else 0.0
    print(name, f"{took:.2f}", f"{error:.5f}", flush=True)


def choose(part, wanted=None, seconds=170):
    """Sets FORMS[part]: the form wanted, or else the fastest that is right here. Other processes
    measure, since a kernel may fail in a way that ends its process."""
    if not wanted:
        end = time.monotonic() + seconds
        runs = {
            name: subprocess.Popen(
                [sys.executable, __file__, part, name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in KNOWN[part]
        }
        right = []
        for name, run in runs.items():
            try:
                lines = run.communicate(timeout=max(0.1, end - time.monotonic()))[0].splitlines()
            except subprocess.TimeoutExpired:
                run.kill()
                lines = [f"not measured within {seconds} s"]
            row = lines[-1].split() if lines else []
            if len(row) == 3 and row[0] == name and run.returncode == 0:
                print(f"{part}, {name}: {row[1]} ms, error {row[2]}", flush=True)
                if float(row[2]) < MOST_ERROR:
                    right.append((float(row[1]), name))
            else:
                print(f"{part}, {name}: " + " | ".join(lines[-4:])[-600:], flush=True)
        wanted = min(right)[1] if right else "plain"
    FORMS[part] = KNOWN[part][wanted]
    print(f"{part}: {wanted}", flush=True)
    return wanted


def main():
    part, name = (*sys.argv[1:], "plain")[:2] if len(sys.argv) in (2, 3) else ("", "")
    if name not in KNOWN.get(part, ()):
        sys.exit(__doc__)
    measure(part, name, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
