"""The model that train.py trains: Gemma 3's layers at a small size.

Five of six layers see a window of tokens, the sixth sees all. Queries and keys have norms; a layer
has norms before and after its mixer and its feed-forward network; the two kinds of layers have
RoPE bases of their own. All numbers of SHAPE go into the GGUF file.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

SHAPE = {
    "vocabulary": 6144,
    "width": 384,
    "layers": 12,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "feed_forward": 768,
    "window": 512,
    "period": 6,  # layers whose number + 1 is a multiple see all tokens
    "base": 5e6,
    "window_base": 1e4,
    "epsilon": 1e-6,
    "context": 131072,
}


class Norm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), self.epsilon)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


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


class Layer(nn.Module):
    def __init__(self, shape, windowed):
        super().__init__()
        self.shape, self.windowed = shape, windowed
        width, dim, ff = shape["width"], shape["head_dim"], shape["feed_forward"]
        q, kv = shape["heads"] * dim, shape["kv_heads"] * dim

        def product(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=False)

        self.attn_q, self.attn_k = product(width, q), product(width, kv)
        self.attn_v, self.attn_output = product(width, kv), product(q, width)
        self.ffn_gate, self.ffn_up = product(width, ff), product(width, ff)
        self.ffn_down = product(ff, width)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            setattr(self, name, Norm(width, shape["epsilon"]))
        for name in ("attn_q_norm", "attn_k_norm"):
            setattr(self, name, Norm(dim, shape["epsilon"]))

    def attend(self, x, cos, sin):
        batch, tokens, _ = x.shape
        dim, group = self.shape["head_dim"], self.shape["heads"] // self.shape["kv_heads"]

        def heads(product):
            return product(x).view(batch, tokens, -1, dim).transpose(1, 2)

        q = rotate(self.attn_q_norm(heads(self.attn_q)), cos, sin)
        k = rotate(self.attn_k_norm(heads(self.attn_k)), cos, sin).repeat_interleave(group, 1)
        v = heads(self.attn_v).repeat_interleave(group, 1)
        if self.windowed and tokens > self.shape["window"]:
            out = attend_window(q, k, v, self.shape["window"])
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_output(out.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x, cos, sin):
        x = x + self.post_attention_norm(self.attend(self.attn_norm(x), cos, sin))
        h = self.ffn_norm(x)
        h = self.ffn_down(F.gelu(self.ffn_gate(h), approximate="tanh") * self.ffn_up(h))
        return x + self.post_ffw_norm(h)


class Reader(nn.Module):
    def __init__(self, shape=None):
        super().__init__()
        self.shape = shape = dict(SHAPE if shape is None else shape)
        self.token_embd = nn.Embedding(shape["vocabulary"], shape["width"])
        self.blk = nn.ModuleList(
            Layer(shape, (i + 1) % shape["period"] != 0) for i in range(shape["layers"])
        )
        self.output_norm = Norm(shape["width"], shape["epsilon"])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def angles(self, base, tokens, like):
        dim = self.shape["head_dim"]
        frequencies = base ** -(torch.arange(0, dim, 2, device=like.device).float() / dim)
        angles = torch.outer(torch.arange(tokens, device=like.device).float(), frequencies)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def hidden(self, ids):
        """[batch, tokens, width] before the output matrix."""
        x = self.token_embd(ids) * math.sqrt(self.shape["width"])
        if torch.is_autocast_enabled():
            x = x.bfloat16()
        near = self.angles(self.shape["window_base"], ids.size(1), x)
        far = self.angles(self.shape["base"], ids.size(1), x)
        for layer in self.blk:
            x = layer(x, *(near if layer.windowed else far))
        return self.output_norm(x)

    def forward(self, ids, targets, mask, text_weight=0.4):
        """Loss of a batch: of the answers' tokens, and of the text's with a smaller weight."""
        h = self.hidden(ids).flatten(0, 1)
        weight = self.token_embd.weight.to(h.dtype)
        losses = torch.cat(
            [
                F.cross_entropy(F.linear(part, weight).float(), wanted, reduction="none")
                for part, wanted in zip(h.split(32768), targets.flatten().split(32768))
            ]
        )
        mask = mask.flatten().float()
        answers = (losses * mask).sum() / mask.sum().clamp(min=1)
        text = (losses * (1 - mask)).sum() / (1 - mask).sum().clamp(min=1)
        return text_weight * text + answers, text.detach(), answers.detach()
