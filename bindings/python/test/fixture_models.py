"""Models of transformers with the weights of the fixtures in test/fixtures/models.

The fixtures were made from such models. of(name) makes the model again, in float32.
"""
import json
import pathlib

import gguf
import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "test/fixtures/models"
NAMES = ["falcon-h1", "gemma3", "gpt-oss", "granitehybrid", "lfm2", "nemotron_h", "qwen35",
         "qwen3next"]

FULL, WINDOW, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NETWORK = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


class Weights:
    """Tensors of a GGUF file as a state dict of transformers."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {
            t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32).reshape(
                tuple(reversed([int(n) for n in t.shape]))
            )
            for t in reader.tensors
        }
        self.values = {name: field.contents() for name, field in reader.fields.items()}
        self.state = {}

    def __call__(self, name):
        return torch.from_numpy(self.tensors[name])

    def add(self, to, name, change=lambda x: x):
        """Adds a tensor with its bias, where the file has them."""
        for suffix in ("weight", "bias"):
            if f"{name}.{suffix}" in self.tensors:
                self.state[f"{to}.{suffix}"] = change(self(f"{name}.{suffix}"))


def heads_apart(matrix, heads):
    """The order of a rotated matrix in transformers: its file has halves interleaved."""
    rows, columns = matrix.shape
    return matrix.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def by_group(tensor, heads, groups):
    """Value heads in the order of transformers: the file has them by their place in a group."""
    shape = tensor.shape
    tiled = tensor.reshape(heads // groups, groups, -1)
    return tiled.transpose(0, 1).reshape(shape)


def add_mamba(w, to, block):
    w.add(f"{to}.in_proj", f"{block}.ssm_in")
    w.add(f"{to}.out_proj", f"{block}.ssm_out")
    w.add(f"{to}.conv1d", f"{block}.ssm_conv1d", lambda x: x[:, None] if x.dim() == 2 else x)
    w.add(f"{to}.norm", f"{block}.ssm_norm", lambda x: x.reshape(-1))
    w.state[f"{to}.dt_bias"] = w(f"{block}.ssm_dt.bias")
    w.state[f"{to}.A_log"] = torch.log(-w(f"{block}.ssm_a").reshape(-1))
    w.state[f"{to}.D"] = w(f"{block}.ssm_d").reshape(-1)


def add_parts(w, to, block, parts):
    for theirs, ours in parts.items():
        w.add(f"{to}.{theirs}", f"{block}.{ours}")


def layer_names(w):
    """What each layer is called in transformers and in the file."""
    count = w.values[f"{w.values['general.architecture']}.block_count"]
    return [(f"model.layers.{i}", f"blk.{i}") for i in range(count)]


SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}


def lfm2(w):
    for to, block in layer_names(w):
        w.add(f"{to}.operator_norm", f"{block}.attn_norm")
        w.add(f"{to}.ffn_norm", f"{block}.ffn_norm")
        add_parts(w, f"{to}.feed_forward", block, {
            "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
        })
        add_parts(w, f"{to}.self_attn", block, {
            **ATTENTION, "out_proj": "attn_output", "q_layernorm": "attn_q_norm",
            "k_layernorm": "attn_k_norm",
        })
        w.state.pop(f"{to}.self_attn.o_proj.weight", None)
        add_parts(w, f"{to}.conv", block, {
            "in_proj": "shortconv.in_proj", "out_proj": "shortconv.out_proj",
        })
        w.add(f"{to}.conv.conv", f"{block}.shortconv.conv", lambda x: x[:, None])
    w.add("model.embedding_norm", "token_embd_norm")
    config = transformers.Lfm2Config(
        **SHAPE, num_hidden_layers=4, norm_eps=1e-5, conv_L_cache=3, tie_word_embeddings=True,
        block_auto_adjust_ff_dim=False, layer_types=[CONV, CONV, FULL, CONV],
    )
    return transformers.Lfm2ForCausalLM(config)


def add_delta_net(w, to, block, tiled):
    """The order of value heads: tiled in files of Qwen3.5."""
    heads, groups, dim = 4, 2, 16

    def grouped(x):
        return by_group(x, heads, groups) if tiled else x

    def values(x):  # of queries, keys and values
        keys = 2 * groups * dim
        return torch.cat([x[:keys], grouped(x[keys:])])

    w.state[f"{to}.dt_bias"] = grouped(w(f"{block}.ssm_dt.bias"))
    w.state[f"{to}.A_log"] = torch.log(-grouped(w(f"{block}.ssm_a")))
    w.add(f"{to}.norm", f"{block}.ssm_norm")
    w.add(f"{to}.conv1d", f"{block}.ssm_conv1d", lambda x: values(x)[:, None])
    w.add(f"{to}.out_proj", f"{block}.ssm_out",
          lambda x: grouped(x.t().contiguous()).t().contiguous())
    qkv, z = values(w(f"{block}.attn_qkv.weight")), grouped(w(f"{block}.attn_gate.weight"))
    if tiled:
        w.state[f"{to}.in_proj_qkv.weight"], w.state[f"{to}.in_proj_z.weight"] = qkv, z
        w.add(f"{to}.in_proj_b", f"{block}.ssm_beta", grouped)
        w.add(f"{to}.in_proj_a", f"{block}.ssm_alpha", grouped)
        return
    q, k, v = qkv.split([groups * dim, groups * dim, heads * dim])
    parts = [part.reshape(groups, -1, part.shape[1]) for part in (q, k, v, z)]
    w.state[f"{to}.in_proj_qkvz.weight"] = torch.cat(parts, 1).reshape(-1, 64)
    w.add(f"{to}.in_proj_ba", f"{block}.ssm_ba")


GATED = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
DELTA_NET = {
    "head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
}


def add_gated(w, tiled):
    def less_one(x):
        return x - 1

    for index, (to, block) in enumerate(layer_names(w)):
        w.add(f"{to}.input_layernorm", f"{block}.attn_norm", less_one)
        w.add(f"{to}.post_attention_layernorm", f"{block}.post_attention_norm", less_one)
        if index == 3:
            add_parts(w, f"{to}.self_attn", block, ATTENTION)
            for theirs, ours in GATED.items():
                w.add(f"{to}.self_attn.{theirs}", f"{block}.{ours}", less_one)
        else:
            add_delta_net(w, f"{to}.linear_attn", block, tiled)
    w.add("model.norm", "output_norm", less_one)
    return {**SHAPE, "rope_parameters": {**SHAPE["rope_parameters"], "partial_rotary_factor": 0.25}}


def qwen35(w):
    shape = add_gated(w, True)
    for to, block in layer_names(w):
        add_parts(w, f"{to}.mlp", block, NETWORK)
    shape["rope_parameters"]["mrope_section"] = [2, 1, 1]
    config = transformers.Qwen3_5TextConfig(**{**shape, **DELTA_NET})
    return transformers.Qwen3_5ForCausalLM(config)


def qwen3next(w):
    shape = add_gated(w, False)
    for to, block in layer_names(w):
        w.add(f"{to}.mlp.gate", f"{block}.ffn_gate_inp")
        w.add(f"{to}.mlp.shared_expert_gate", f"{block}.ffn_gate_inp_shexp",
              lambda x: x.reshape(1, -1))
        add_parts(w, f"{to}.mlp.shared_expert", block,
                  {theirs: f"{ours}_shexp" for theirs, ours in NETWORK.items()})
        gate, up = (w(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        w.state[f"{to}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        w.state[f"{to}.mlp.experts.down_proj"] = w(f"{block}.ffn_down_exps.weight")
    config = transformers.Qwen3NextConfig(**{
        **shape, **DELTA_NET, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    })
    return transformers.Qwen3NextForCausalLM(config)


def granitehybrid(w):
    for index, (to, block) in enumerate(layer_names(w)):
        w.add(f"{to}.input_layernorm", f"{block}.attn_norm")
        w.add(f"{to}.post_attention_layernorm", f"{block}.ffn_norm")
        w.state[f"{to}.shared_mlp.input_linear.weight"] = torch.cat(
            [w(f"{block}.ffn_gate.weight"), w(f"{block}.ffn_up.weight")]
        )
        w.add(f"{to}.shared_mlp.output_linear", f"{block}.ffn_down")
        if index != 2:
            add_mamba(w, f"{to}.mamba", block)
            continue
        add_parts(w, f"{to}.self_attn", block, ATTENTION)
        for part, heads in (("q", 4), ("k", 2)):
            name = f"{to}.self_attn.{part}_proj.weight"
            w.state[name] = heads_apart(w.state[name], heads)
    w.add("model.norm", "output_norm")
    config = transformers.GraniteMoeHybridConfig(**{
        **SHAPE, **MAMBA, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 128, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "residual_multiplier": 0.5, "attention_multiplier": 0.125,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR], "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    })
    return transformers.GraniteMoeHybridForCausalLM(config)


def falcon_h1(w):
    for to, block in layer_names(w):
        w.add(f"{to}.input_layernorm", f"{block}.attn_norm")
        w.state[f"{to}.pre_ff_layernorm.weight"] = w(f"{block}.ffn_norm")
        add_parts(w, f"{to}.self_attn", block, ATTENTION)
        add_parts(w, f"{to}.feed_forward", block, NETWORK)
        add_mamba(w, f"{to}.mamba", block)
    w.add("model.final_layernorm", "output_norm")
    config = transformers.FalconH1Config(**{
        **SHAPE, **MAMBA, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "head_dim": 32,
        "mamba_d_ssm": 128, "mamba_rms_norm": False, "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    })
    return transformers.FalconH1ForCausalLM(config)


def nemotron_h(w):
    kinds = [LINEAR, "mlp", FULL, "mlp", LINEAR, "mlp"]
    for kind, (to, block) in zip(kinds, layer_names(w)):
        w.add(f"{to}.norm", f"{block}.attn_norm")
        if kind == LINEAR:
            add_mamba(w, f"{to}.mixer", block)
        else:
            add_parts(w, f"{to}.mixer", block, ATTENTION if kind == FULL else NETWORK)
    w.add("model.norm_f", "output_norm")
    config = transformers.NemotronHConfig(**{
        **SHAPE, "layers_block_type": kinds, "head_dim": 32, "ssm_state_size": 16,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "conv_kernel": 4,
        "chunk_size": 16, "layer_norm_epsilon": 1e-5,
    })
    return transformers.NemotronHForCausalLM(config)


def gemma3(w):
    def less_one(x):
        return x - 1

    norms = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    }
    for to, block in layer_names(w):
        for theirs, ours in norms.items():
            w.add(f"{to}.{theirs}", f"{block}.{ours}", less_one)
        add_parts(w, f"{to}.self_attn", block, ATTENTION)
        add_parts(w, f"{to}.mlp", block, NETWORK)
    w.add("model.norm", "output_norm", less_one)
    ropes = {"full_attention": 1e6, "sliding_attention": 1e4}
    config = transformers.Gemma3TextConfig(**{
        **SHAPE, "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window": 16, "rms_norm_eps": 1e-6, "layer_types": [WINDOW] * 5 + [FULL],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in ropes.items()
        },
    })
    return transformers.Gemma3ForCausalLM(config)


def gpt_oss(w):
    for to, block in layer_names(w):
        w.add(f"{to}.input_layernorm", f"{block}.attn_norm")
        w.add(f"{to}.post_attention_layernorm", f"{block}.post_attention_norm")
        add_parts(w, f"{to}.self_attn", block, ATTENTION)
        w.state[f"{to}.self_attn.sinks"] = w(f"{block}.attn_sinks.weight")
        w.add(f"{to}.mlp.router", f"{block}.ffn_gate_inp")
        experts = f"{to}.mlp.experts"
        parts = [w(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        joint = torch.stack(parts, 2).flatten(1, 2)  # rows alternate
        w.state[f"{experts}.gate_up_proj"] = joint.transpose(1, 2).contiguous()
        biases = [w(f"{block}.ffn_{part}_exps.bias") for part in ("gate", "up")]
        w.state[f"{experts}.gate_up_proj_bias"] = torch.stack(biases, 2).flatten(1)
        down = w(f"{block}.ffn_down_exps.weight")
        w.state[f"{experts}.down_proj"] = down.transpose(1, 2).contiguous()
        w.state[f"{experts}.down_proj_bias"] = w(f"{block}.ffn_down_exps.bias")
    w.add("model.norm", "output_norm")
    config = transformers.GptOssConfig(**{
        **SHAPE, "num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 64,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": [WINDOW, FULL] * 2, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
        },
    })
    return transformers.GptOssForCausalLM(config)


MAKERS = {
    "falcon-h1": falcon_h1, "gemma3": gemma3, "gpt-oss": gpt_oss, "granitehybrid": granitehybrid,
    "lfm2": lfm2, "nemotron_h": nemotron_h, "qwen35": qwen35, "qwen3next": qwen3next,
}


def of(name):
    """Returns the model and the path of its GGUF file."""
    path = FOLDER / f"{name}.gguf"
    w = Weights(path)
    w.add("model.embed_tokens", "token_embd")
    w.add("lm_head", "output")
    model = MAKERS[name](w)
    own = model.state_dict()
    if "backbone.embeddings.weight" in own:
        w.state = {key.replace("model.", "backbone.", 1): x for key, x in w.state.items()}
    embedding = next(key for key in own if "embed" in key)
    w.state[embedding] = w("token_embd.weight")
    w.state.setdefault("lm_head.weight", w("token_embd.weight"))
    w.state = {key: x for key, x in w.state.items() if key in own or "embed" not in key}
    missing, unknown = model.load_state_dict(w.state, strict=False)
    missing = [key for key in missing if "rotary" not in key]
    if missing or unknown:
        raise ValueError(f"{name}: missing {missing}, unknown {unknown}")
    return model.eval(), path


def reference(name):
    """Returns the fixture's tokens, and the logits at some positions."""
    entry = next(e for e in json.loads((FOLDER / "fixtures.json").read_text("utf-8"))
                 if e["model"] == f"{name}.gguf")
    logits = np.fromfile(FOLDER / entry["logits"], np.float32).reshape(entry["shape"])
    return torch.tensor([entry["tokens"]]), entry["positions"], torch.from_numpy(logits)
