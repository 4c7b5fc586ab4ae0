"""The models that train.py trains. All numbers of SHAPES go into the GGUF file.

gemma3: five of six layers see a window of tokens, the sixth sees all. Queries and keys have norms;
a layer has norms before and after its mixer and its feed-forward network; the two kinds of layers
have RoPE bases of their own.

qwen35: three of four layers are gated delta nets, the fourth is gated attention. Behind them comes
an MTP layer, as in Qwen's files: from the final hidden state of a token and the embedding of the
next one it predicts the token after that. It shares the embedding and the output matrix.
"""

import math

import torch
import torch.nn.functional as F
from forms import FORMS
from torch import nn

COMMON = {
    "vocabulary": 6144,
    "width": 384,
    "layers": 12,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "base": 5e6,
    "epsilon": 1e-6,
    "context": 131072,
}
SHAPES = {
    "gemma3": COMMON
    | {
        "architecture": "gemma3",
        "feed_forward": 768,
        "period": 6,  # layers whose number + 1 is a multiple see all tokens
        "rope_dim": 64,
        "window": 512,
        "window_base": 1e4,
    },
    "qwen35": COMMON
    | {
        "architecture": "qwen35",
        "feed_forward": 640,
        "period": 4,
        "rope_dim": 32,
        "key_heads": 3,
        "value_heads": 6,
        "state": 64,  # of a head: state x state numbers
        "convolution": 4,
        "mtp": 1,  # layers that predict one token more; 0 or 1
    },
}


class Norm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), self.epsilon)


def rotate(x, cos, sin):
    """Turns the first dimensions of each head, as many as there are cosines and sines."""
    a, b, rest = x.tensor_split((cos.size(-1), 2 * cos.size(-1)), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def product(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, shape, windowed=False, gated=False):
        super().__init__()
        self.shape, self.windowed, self.gated = shape, windowed, gated
        width, dim = shape["width"], shape["head_dim"]
        self.attn_q = product(width, shape["heads"] * dim * (2 if gated else 1))
        self.attn_k = product(width, shape["kv_heads"] * dim)
        self.attn_v = product(width, shape["kv_heads"] * dim)
        self.attn_output = product(shape["heads"] * dim, width)
        self.attn_q_norm = Norm(dim, shape["epsilon"])
        self.attn_k_norm = Norm(dim, shape["epsilon"])

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        dim, group = self.shape["head_dim"], self.shape["heads"] // self.shape["kv_heads"]

        def heads(matrix):
            return matrix(x).view(batch, tokens, -1, dim).transpose(1, 2)

        q, gate = heads(self.attn_q), None
        if self.gated:  # q and its gate alternate
            q, gate = q[:, 0::2], q[:, 1::2]
        q = rotate(self.attn_q_norm(q), cos, sin)
        k = rotate(self.attn_k_norm(heads(self.attn_k)), cos, sin).repeat_interleave(group, 1)
        v = heads(self.attn_v).repeat_interleave(group, 1)
        if self.windowed and tokens > self.shape["window"]:
            out = FORMS["window"](q, k, v, self.shape["window"])
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.gated:
            out = out * gate.sigmoid()
        return self.attn_output(out.transpose(1, 2).reshape(batch, tokens, -1))


class DeltaNet(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        width, dim, n = shape["width"], shape["state"], shape["value_heads"]
        channels = (2 * shape["key_heads"] + n) * dim
        self.attn_qkv, self.attn_gate = product(width, channels), product(width, n * dim)
        self.ssm_beta, self.ssm_alpha = product(width, n), product(width, n)
        self.ssm_conv1d = nn.Linear(shape["convolution"], channels, bias=False)
        self.ssm_dt = nn.Module()
        self.ssm_dt.bias = nn.Parameter(torch.empty(n).uniform_(-4, -1))
        self.ssm_a = nn.Parameter(-torch.empty(n).uniform_(1, 8))
        self.ssm_norm = Norm(dim, shape["epsilon"])
        self.ssm_out = product(n * dim, width)

    def convolve(self, x):
        taps = self.ssm_conv1d.weight
        x = F.pad(x.transpose(1, 2), (taps.size(1) - 1, 0))
        x = F.conv1d(x, taps[:, None].to(x.dtype), groups=taps.size(0))
        return F.silu(x).transpose(1, 2)

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        dim, keys, values = (self.shape[n] for n in ("state", "key_heads", "value_heads"))
        mixed = self.convolve(self.attn_qkv(x))
        q, k, v = mixed.split((keys * dim, keys * dim, values * dim), -1)
        q, k, v = (y.reshape(batch, tokens, -1, dim) for y in (q, k, v))
        q, k = F.normalize(q.float(), dim=-1) / math.sqrt(dim), F.normalize(k.float(), dim=-1)
        # Value head h uses key head h mod `keys`.
        q, k = (y.repeat(1, 1, values // keys, 1) for y in (q, k))
        beta = self.ssm_beta(x).float().sigmoid()
        log_decay = self.ssm_a * F.softplus(self.ssm_alpha(x).float() + self.ssm_dt.bias)
        out = FORMS["delta"](q, k, v, log_decay, beta)
        out = self.ssm_norm(out.to(x.dtype)) * F.silu(self.attn_gate(x)).view_as(out)
        return self.ssm_out(out.reshape(batch, tokens, -1).to(x.dtype))


class FeedForward(nn.Module):
    def __init__(self, shape, activation):
        super().__init__()
        width, ff = shape["width"], shape["feed_forward"]
        self.ffn_gate, self.ffn_up = product(width, ff), product(width, ff)
        self.ffn_down = product(ff, width)
        self.activation = activation

    def forward(self, x):
        return self.ffn_down(self.activation(self.ffn_gate(x)) * self.ffn_up(x))


def gelu(x):
    return F.gelu(x, approximate="tanh")


class SandwichLayer(nn.Module):  # gemma3
    def __init__(self, shape, is_full):
        super().__init__()
        self.is_full = is_full
        self.mixer, self.ffn = Attention(shape, windowed=not is_full), FeedForward(shape, gelu)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            setattr(self, name, Norm(shape["width"], shape["epsilon"]))
        for norm in (self.post_attention_norm, self.post_ffw_norm):
            nn.init.constant_(norm.weight, (2 * shape["layers"]) ** -0.5)

    def forward(self, x, cos, sin):
        x = x + self.post_attention_norm(self.mixer(self.attn_norm(x), cos, sin))
        return x + self.post_ffw_norm(self.ffn(self.ffn_norm(x)))


class HybridLayer(nn.Module):  # qwen35
    def __init__(self, shape, is_full):
        super().__init__()
        self.is_full = is_full
        self.mixer = Attention(shape, gated=True) if is_full else DeltaNet(shape)
        self.ffn = FeedForward(shape, F.silu)
        for name in ("attn_norm", "post_attention_norm"):
            setattr(self, name, Norm(shape["width"], shape["epsilon"]))

    def forward(self, x, cos, sin):
        x = x + self.mixer(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.post_attention_norm(x))


class MtpLayer(HybridLayer):
    def __init__(self, shape):
        super().__init__(shape, is_full=True)
        self.nextn = nn.Module()
        self.nextn.eh_proj = product(2 * shape["width"], shape["width"])
        for name in ("enorm", "hnorm", "shared_head_norm"):
            setattr(self.nextn, name, Norm(shape["width"], shape["epsilon"]))

    def forward(self, hidden, embeddings, cos, sin):
        """The inputs of the output matrix. embeddings: of the token after each of `hidden`."""
        parts = (self.nextn.enorm(embeddings), self.nextn.hnorm(hidden))
        x = super().forward(self.nextn.eh_proj(torch.cat(parts, -1)), cos, sin)
        return self.nextn.shared_head_norm(x)


class Reader(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        layer = SandwichLayer if shape["architecture"] == "gemma3" else HybridLayer
        self.token_embd = nn.Embedding(shape["vocabulary"], shape["width"])
        self.blk = nn.ModuleList(
            layer(shape, (i + 1) % shape["period"] == 0) for i in range(shape["layers"])
        )
        if shape.get("mtp"):
            self.blk.append(MtpLayer(shape))
        self.output_norm = Norm(shape["width"], shape["epsilon"])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.3 if "conv1d" in name else 0.02)

    def tensors(self):
        """{name in a GGUF file: parameter}"""
        return {
            name.replace("mixer.", "").replace("ffn.", ""): value
            for name, value in self.state_dict().items()
        }

    def angles(self, base, tokens, like):
        dim = self.shape["rope_dim"]
        frequencies = base ** -(torch.arange(0, dim, 2, device=like.device).float() / dim)
        angles = torch.outer(torch.arange(tokens, device=like.device).float(), frequencies)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def hidden(self, ids):
        """[batch, tokens, width] before the output matrix."""
        x = self.token_embd(ids)
        if self.shape["architecture"] == "gemma3":
            x = x * math.sqrt(self.shape["width"])
        if torch.is_autocast_enabled():
            x = x.bfloat16()
        far = self.angles(self.shape["base"], ids.size(1), x)
        near = self.angles(self.shape.get("window_base", 1e4), ids.size(1), x)
        for layer in self.blk[: self.shape["layers"]]:
            x = layer(x, *(far if layer.is_full else near))
        return self.output_norm(x)

    def token_losses(self, h, targets):
        return F.cross_entropy(
            F.linear(h, self.token_embd.weight.to(h.dtype)).float(), targets, reduction="none"
        )

    def hidden_of_next(self, hidden, ids):
        """As hidden(), of the MTP layer. ids: of the token after each of `hidden`."""
        embeddings = self.token_embd(ids).to(hidden.dtype)
        return self.blk[-1](
            hidden, embeddings, *self.angles(self.shape["base"], ids.size(1), hidden)
        )

    def losses(self, hidden, targets, mask):
        """Mean loss of the text's tokens, and of the answers' tokens."""
        h = hidden.flatten(0, 1)
        parts = zip(h.split(32768), targets.flatten().split(32768))
        losses = torch.cat([self.token_losses(part, wanted) for part, wanted in parts])
        mask = mask.flatten().float()
        answers = (losses * mask).sum() / mask.sum().clamp(min=1)
        text = (losses * (1 - mask)).sum() / (1 - mask).sum().clamp(min=1)
        return text, answers

    def forward(self, ids, targets, mask, text_weight=0.4, mtp_weight=0.2):
        """Loss of a batch: of the answers' tokens, and of the text's with a smaller weight; of the
        MTP layer likewise, with a weight of its own."""
        h = self.hidden(ids)
        text, answers = self.losses(h, targets, mask)
        loss = text_weight * text + answers
        if self.shape.get("mtp"):
            next_h = self.hidden_of_next(h[:, :-1], targets[:, :-1])
            next_text, next_answers = self.losses(next_h, targets[:, 1:], mask[:, 1:])
            loss = loss + mtp_weight * (text_weight * next_text + next_answers)
        return loss, text.detach(), answers.detach()

    def compile_parts(self):
        """Compiles layer by layer: layers of a kind share their code, which is compiled once."""
        for layer in self.blk:
            layer.compile(dynamic=False)
        self.token_losses = torch.compile(self.token_losses, dynamic=False)
