"""Attention in a window and the gated delta rule: in plain PyTorch, and in forms that are faster on
a GPU. `choose` measures forms, and takes the fastest whose outputs and gradients agree with plain
PyTorch's.

    forms.py {window|delta}     prints a line for each form: its name, milliseconds, worst error
"""

import importlib
import subprocess
import sys
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


def delta_rule_gated(q, k, v, log_decay, beta):
    """By flash-linear-attention's kernels. Triton 3.4 to 3.7.0 gets a backward kernel wrong with
    tiles of 64 on Hopper, so the kernel gets tiles of 32."""
    tiles = importlib.import_module("fla.ops.common.chunk_o")
    if not tiles.TRITON_ABOVE_3_7_1:
        tiles.TRITON_ABOVE_3_7_1 = True
        tiles.check_shared_mem = lambda *_: False
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return rule(q, k, v, log_decay.float(), beta.float(), scale=1.0)[0]


def delta_rule_by_channel(q, k, v, log_decay, beta):
    """By flash-linear-attention's rule with a decay for each channel: slower, but sound there."""
    rule = importlib.import_module("fla.ops.kda").chunk_kda
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
    for i in range(5):
        if i == 2:
            torch.cuda.synchronize()
            begin = time.monotonic()
        out = form(*inputs, *rest)
        out.backward(gradient.to(out.dtype))
    torch.cuda.synchronize()
    return (time.monotonic() - begin) / 3 * 1000


def measure(part, device="cuda"):
    """Prints a line for each form as soon as it is measured, up to the first right one that is not
    plain PyTorch: Triton takes minutes to tune a form. One that fails may end the process."""
    exact = results(KNOWN[part]["plain"], part, 2, 2048, device)
    for name, form in KNOWN[part].items():
        try:
            found = results(form, part, 2, 2048, device)
            error = worst(found, exact)
            if device == "cuda" and error < MOST_ERROR:  # of another shape, too
                more = results(form, part, 3, 4096 + 64, device)
                want = results(KNOWN[part]["plain"], part, 3, 4096 + 64, device)
                error = max(error, worst(more, want))
            took = milliseconds(form, part, device) if device == "cuda" else 0.0
            print(name, f"{took:.2f}", f"{error:.5f}", flush=True)
            if name != "plain" and error < MOST_ERROR:
                break
        except Exception as problem:  # a form that does not run here
            print(f"# {name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)


def choose(part, wanted=None):
    """Sets FORMS[part]: the form wanted, or else the fastest that is right here. Another process
    measures, since a kernel may fail in a way that ends it."""
    if not wanted:
        try:
            done = subprocess.run(
                [sys.executable, __file__, part], capture_output=True, text=True, timeout=240
            )
            text = done.stdout + "".join(f"# {line}\n" for line in done.stderr.splitlines()[-3:])
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode() + "# took too long\n"
        print(text, end="", flush=True)
        rows = [line.split() for line in text.splitlines() if line and line[0] != "#"]
        right = [
            (float(row[1]), row[0]) for row in rows if len(row) == 3 and float(row[2]) < MOST_ERROR
        ]
        wanted = min(right)[1] if right else "plain"
    FORMS[part] = KNOWN[part][wanted]
    print(f"{part}: {wanted}", flush=True)
    return wanted


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in KNOWN:
        sys.exit(__doc__)
    measure(sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu")
