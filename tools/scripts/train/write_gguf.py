#!/usr/bin/env python3
"""Makes a GGUF file of the weights of train.py: needs the packages gguf and torch.

    write_gguf.py {gemma3|qwen35} WEIGHTS-FOLDER TOKENIZER.gguf OUT.gguf [TYPE]

TYPE is q4_0, q5_0, q8_0 (the default), f16 or f32.
"""

import pathlib
import sys

import gguf
import numpy as np
from reader import SHAPES

KINDS = {
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q5_0": (gguf.GGMLQuantizationType.Q5_0, gguf.LlamaFileType.MOSTLY_Q5_0),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def add_shape(writer, shape):
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["width"])
    writer.add_block_count(shape["layers"] + shape.get("mtp", 0))
    writer.add_feed_forward_length(shape["feed_forward"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_freq_base(shape["base"])
    writer.add_rope_dimension_count(shape["rope_dim"])
    if shape["architecture"] == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", shape["window_base"])
        writer.add_sliding_window(shape["window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", shape["period"])
    else:
        writer.add_uint32("qwen35.full_attention_interval", shape["period"])
        writer.add_ssm_conv_kernel(shape["convolution"])
        writer.add_ssm_inner_size(shape["value_heads"] * shape["state"])
        writer.add_ssm_state_size(shape["state"])
        writer.add_ssm_time_step_rank(shape["value_heads"])
        writer.add_ssm_group_count(shape["key_heads"])
        writer.add_rope_dimension_sections([shape["rope_dim"] // 2, 0, 0, 0])
        writer.add_nextn_predict_layers(shape.get("mtp", 0))
    writer.add_layer_norm_rms_eps(shape["epsilon"])
    writer.add_vocab_size(shape["vocabulary"])


def copy_tokenizer(writer, path):
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=element)


def weights_of(folder):
    result = {}
    for path in sorted(folder.glob("weights.*.npz")):
        with np.load(path) as arrays:
            result |= {name: arrays[name].astype(np.float32) for name in arrays.files}
    result.pop("progress", None)
    return result


def main():
    arguments = sys.argv[1:] if len(sys.argv) == 6 else sys.argv[1:] + ["q8_0"]
    if len(arguments) != 5 or arguments[0] not in SHAPES or arguments[4] not in KINDS:
        sys.exit(__doc__)
    architecture, weights, tokenizer, out, kind = arguments
    kind, file_type = KINDS[kind]
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_name(f"reader, {architecture}")
    writer.add_file_type(file_type)
    add_shape(writer, SHAPES[architecture])
    copy_tokenizer(writer, tokenizer)
    for name, array in weights_of(pathlib.Path(weights)).items():
        matrix = array.ndim == 2 and "conv1d" not in name
        stored = gguf.quants.quantize(array, kind) if matrix else array
        writer.add_tensor(name, stored, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
