"""The public header for ctypes: structs, functions and the library.

test/layout_test.py compares this module with include/kvasir.h and kvasir_experimental.h.
"""
from __future__ import annotations

import ctypes
import pathlib
from ctypes import POINTER, Structure, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Tuple

LIBRARY = "libkvasir.so.0.2"  # the soname
HEADER_VERSION = 200  # KV_VERSION_NUMBER
NO_OFFSET = NO_BYTE = 2**64 - 1

TEXT_FN = ctypes.CFUNCTYPE(c_int32, c_void_p, c_size_t, c_void_p)
PROGRESS_FN = ctypes.CFUNCTYPE(c_int32, c_int32, c_uint64, c_uint64, c_void_p)
LOG_FN = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

# KV_ flags. A bit has one meaning in every function.
TOKENIZE_SPECIAL, TOKENIZE_BOS, TOKENIZE_DOCUMENT = 0x01, 0x02, 0x04
VOCABULARY_ONLY, VERIFY, CACHE_UNCHECKED, REPLACE = 0x08, 0x10, 0x20, 0x40
KEEP_TURN, TRACE_PASSAGES, KEEP_THINKING, PLAN_DRAFTS = 0x100, 0x200, 0x400, 0x800
NO_LOOKUP = 0x1000
DOCUMENT_CANDIDATE, DOCUMENT_ATTENDED = 1, 2
STRATEGY_PREFILL, STRATEGY_CACHE, STRATEGY_INDEX, STRATEGY_EXPERIMENTAL = 1, 2, 4, 8

_TYPES: Dict[str, Any] = {
    "i32": c_int32, "u32": c_uint32, "u64": c_uint64, "f32": ctypes.c_float, "f64": ctypes.c_double,
    "string": c_char_p, "pointer": c_void_p, "progress": PROGRESS_FN, "log": LOG_FN,
    "text": TEXT_FN,
}


def _fields(text: str) -> List[Tuple[str, Any]]:
    """Fields in the order of C: "u32 threads, char[32] name"."""
    found = []
    for kind, name in (field.split() for field in text.split(",")):
        base, _, count = kind.rstrip("]").partition("[")
        if count:
            item: Any = {"char": ctypes.c_char, "u8": ctypes.c_uint8, "u64": c_uint64}[base]
            found.append((name, item * int(count)))
        else:
            found.append((name, _TYPES[base]))
    return found


class kv_error(Structure):
    _fields_ = _fields("i32 status, i32 sys_errno, u64 offset, char[384] message")


class kv_control(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 flags, pointer cancel, progress progress, pointer user""")


class kv_model_options(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 flags, log log, pointer log_user, string chat_format, string device,
        u64 device_memory, string hash_directory""")


class kv_model_info(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 layers, u32 width, u32 heads, u32 kv_heads, u32 head_dim,
        u32 feed_forward, u32 vocabulary, u64 context_tokens, u64 parameters, u64 weight_bytes,
        u64 kv_bytes_per_token, char[32] architecture, char[64] name, char[96] weights,
        char[32] tokenizer, char[16] chat_format, char[72] fingerprint, char[40] hash,
        u32 thinks, u32 mtp_layers""")


class kv_session_options(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 threads, u64 context_tokens, u32 window_tokens, u32 prefill_chunk,
        u32 precision, u32 flags, pointer decode, pointer prefill, u64 memory_limit,
        string spill_directory, string instructions, log log, pointer log_user, u32 draft_tokens,
        u32 reserved""")


class kv_generate_options(Structure):
    _fields_ = [
        *_fields("""
            u32 struct_size, u32 flags, u64 seed, u32 max_tokens, f32 temperature, u32 top_k,
            f32 top_p, f32 min_p, f32 repetition_penalty, u32 stop_count, u32 thinking"""),
        ("stop", POINTER(c_char_p)),
        *_fields("text on_thinking, u32 thinking_tokens, u32 reserved"),
    ]


class kv_answer(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 stop_reason, u64 question_tokens, u64 answer_tokens,
        u64 first_token_ns, u64 total_ns, u64 tokens_read, u64 tokens_present,
        u64 thinking_tokens""")


class kv_passage(Structure):
    _fields_ = _fields("""
        u64 first_token, u64 tokens, u64 first_byte, u64 bytes, f32 share, u32 document""")


class kv_compose_options(Structure):
    _fields_ = [
        *_fields("u32 struct_size, u32 max_documents"),
        ("session", POINTER(kv_session_options)),
    ]


class kv_session_document(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 flags, u64 tokens, f64 score, string path""")


class kv_session_stats(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 threads, u64 tokens, u64 context_tokens, u64 sealed_tokens,
        u32 page_tokens, u32 sink_tokens, u32 window_tokens, u32 prefill_chunk,
        u64 kv_bytes_per_token, u64 private_bytes, u64 mapped_bytes, u64 spilled_bytes,
        u64 memory_limit, u64 prefill_tokens, u64 prefill_ns, u64 sparse_tokens, u64 load_ns,
        u64 budget_tokens, u64 index_tokens, u64 index_bytes, u64 index_ns, u64 last_steps,
        u64 last_decode_ns, u64 last_tokens_read, u64 last_tokens_present, u64 last_pages_touched,
        f64 last_mass_read, u32 gpu_layers, u32 gpu_flags, u64 gpu_weight_bytes, u64 gpu_bytes,
        u64 gpu_memory_limit, char[32] decode_strategy, char[32] chat_format, char[64] device,
        u64 prefilled_again, u64 windows_bytes, u64 last_drafted, u64 last_accepted,
        u64 last_looked_up, u64 last_lookup_accepted""")


class kv_file_info(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 format_version, u64 file_bytes, u64 tokens, u64 sealed_tokens,
        u64 kv_bytes, u32 layers, u32 kv_heads, u32 head_dim, u32 precision, char[64] model_name,
        char[32] chat_format, u32 recurrent_layers, u32 states, u64 state_bytes,
        u64 checkpoints, u64[64] checkpoint_tokens, u64 mtp_tokens, u64 documents""")


class kv_file_document(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 flags, u64 tokens, u64 file_bytes, i32 status, u32 reserved,
        char[4096] path""")


class kv_packed_info(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 packed_version, u64 file_bytes, u64 document_bytes, u64 tokens,
        u32 format_version, u32 level, u32 layers, u32 kv_heads, u32 head_dim, u32 reserved,
        char[64] model_name""")


class kv_library_options(Structure):
    _fields_ = _fields("u32 struct_size, u32 flags, u64 max_bytes, log log, pointer log_user")


class kv_library_document(Structure):
    _fields_ = _fields("""
        u32 struct_size, i32 status, u64 file_bytes, u64 tokens, u64 last_used, char[208] name,
        char[64] model_name, char[72] fingerprint""")


class kv_library_session_options(Structure):
    _fields_ = [
        *_fields("u32 struct_size, u32 flags, string name"),
        ("session", POINTER(kv_session_options)),
    ]


class kv_library_result(Structure):
    _fields_ = _fields("""
        u32 struct_size, i32 save_status, u64 tokens, u64 tokens_found, u32 saved,
        char[212] name""")


class kv_strategy_info(Structure):
    _fields_ = _fields("u32 struct_size, u32 flags, u64 budget_floor, char[32] name")


class kv_cache_shape(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 layers, u32 heads, u32 kv_heads, u32 head_dim, u32 reserved,
        u64 max_tokens, u8[32] identity""")


class kv_cache_options(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 threads, u32 window_tokens, u32 precision, pointer decode,
        u64 memory_limit, string spill_directory""")


class kv_cache_attention_options(Structure):
    _fields_ = _fields("u32 struct_size, u32 flags, f32 scale, f32 softcap")


class kv_layer_state(Structure):
    _fields_ = _fields("""
        u32 layer, u32 layout, u32 type, u32 reserved, pointer numbers, u64 count""")


class kv_checkpoint(Structure):
    _fields_ = _fields("u32 struct_size, u32 count, u64 tokens, pointer states")


class kv_cache_stats(Structure):
    _fields_ = _fields("""
        u32 struct_size, u32 threads, u64 tokens, u64 max_tokens, u64 sealed_tokens,
        u32 page_tokens, u32 sink_tokens, u32 window_tokens, u32 step_tokens, u64 private_bytes,
        u64 mapped_bytes, u64 spilled_bytes, u64 memory_limit, u64 budget_tokens, u64 tokens_read,
        u64 tokens_present, u64 pages_touched, char[32] decode_strategy""")


_S, _P, _Z, _U32, _U64 = c_char_p, c_void_p, c_size_t, c_uint32, c_uint64
_OUT = POINTER(c_void_p)
_COUNT = POINTER(c_size_t)
_DONE = POINTER(c_uint64)
_ERROR = POINTER(kv_error)
_CONTROL = POINTER(kv_control)
_SESSION_OPTIONS = POINTER(kv_session_options)
_SHAPE = POINTER(kv_cache_shape)
_CACHE_OPTIONS = POINTER(kv_cache_options)
_CHECKPOINT = POINTER(kv_checkpoint)

# Functions that return a kv_status: the types of all parameters but the last, a kv_error.
CALLS: Dict[str, List[Any]] = {
    "kv_cancel_create": [_OUT],
    "kv_open": [_S, POINTER(kv_model_options), _CONTROL, _OUT],
    "kv_model_get_info": [_P, POINTER(kv_model_info)],
    "kv_model_inspect": [_S, POINTER(kv_model_info)],
    "kv_model_hash": [_P, _CONTROL],
    "kv_tokenize": [_P, _S, _Z, _U32, _CONTROL, _P, _Z, _COUNT],
    "kv_detokenize": [_P, _P, _Z, _U32, _P, _Z, _COUNT],
    "kv_session_open": [_P, _SESSION_OPTIONS, _OUT],
    "kv_session_set_strategy": [_P, _P],
    "kv_session_prepare": [_P, _CONTROL],
    "kv_prefill": [_P, _S, _Z, _CONTROL, _DONE, _DONE],
    "kv_prefill_tokens": [_P, _P, _Z, _CONTROL, _DONE],
    "kv_generate": [_P, _S, _Z, POINTER(kv_generate_options), _CONTROL, TEXT_FN, _P,
                    POINTER(kv_answer)],
    "kv_session_next": [_P, POINTER(kv_generate_options), _CONTROL, POINTER(c_int32),
                        POINTER(c_int32)],
    "kv_session_score": [_P, _P, _Z, _P, _CONTROL],
    "kv_session_tokens": [_P, _P, _Z, _COUNT],
    "kv_session_rewind": [_P, _U64],
    "kv_session_passages": [_P, _P, _Z, _COUNT],
    "kv_session_fork": [_P, _OUT],
    "kv_session_get_stats": [_P, POINTER(kv_session_stats)],
    "kv_session_stats_json": [_P, _P, _Z, _COUNT],
    "kv_save": [_P, _S, _CONTROL],
    "kv_load": [_P, _S, _SESSION_OPTIONS, _CONTROL, _OUT],
    "kv_load_prefix": [_P, _S, _U64, _SESSION_OPTIONS, _CONTROL, _OUT],
    "kv_session_compose": [_P, POINTER(c_char_p), _Z, POINTER(kv_compose_options), _CONTROL, _OUT],
    "kv_session_get_document": [_P, _U32, POINTER(kv_session_document)],
    "kv_session_document_tokens": [_P, _U32, _P, _Z, _COUNT],
    "kv_session_set_documents": [_P, POINTER(c_char_p), _Z, _CONTROL],
    "kv_session_limit_documents": [_P, _P, _Z],
    "kv_file_inspect": [_S, POINTER(kv_file_info)],
    "kv_file_get_document": [_S, _U32, POINTER(kv_file_document)],
    "kv_file_verify": [_S, _CONTROL],
    "kv_pack": [_S, _S, _U32, _CONTROL],
    "kv_unpack": [_S, _S, _CONTROL],
    "kv_packed_inspect": [_S, POINTER(kv_packed_info)],
    "kv_library_open": [_S, POINTER(kv_library_options), _OUT],
    "kv_library_list": [_P, _U32, POINTER(kv_library_document)],
    "kv_library_session": [_P, _P, _S, _Z, POINTER(kv_library_session_options), _CONTROL, _OUT,
                           POINTER(kv_library_result)],
    "kv_library_compose": [_P, _P, POINTER(c_char_p), _Z, POINTER(kv_compose_options), _CONTROL,
                           _OUT],
    "kv_library_rename": [_P, _S, _S],
    "kv_library_remove": [_P, _S],
    "kv_strategy_create": [_S, _OUT],
    "kv_strategy_set": [_P, _U32, ctypes.c_double],
    "kv_strategy_get": [_P, _U32, POINTER(ctypes.c_double)],
    "kv_strategy_set_layers": [_P, _P, _Z],
    "kv_strategy_list": [_U32, POINTER(kv_strategy_info)],
    "kv_cache_open": [_SHAPE, _CACHE_OPTIONS, _OUT],
    "kv_cache_update": [_P, _U32, _U32, _P, _P, _P, _U32],
    "kv_cache_attention": [_P, _U32, _U32, _P, _P, _U32, POINTER(kv_cache_attention_options),
                           _CONTROL],
    "kv_cache_truncate": [_P, _U64],
    "kv_cache_fork": [_P, _CONTROL, _OUT],
    "kv_cache_save": [_P, _S, _CONTROL],
    "kv_cache_load": [_SHAPE, _S, _CACHE_OPTIONS, _CONTROL, _OUT],
    "kv_session_from_cache": [_P, _P, _P, _Z, _SESSION_OPTIONS, _CONTROL, _OUT],
    "kv_session_from_checkpoint": [_P, _P, _CHECKPOINT, _CHECKPOINT, _P, _Z, _SESSION_OPTIONS,
                                   _CONTROL, _OUT],
    "kv_cache_get_stats": [_P, POINTER(kv_cache_stats)],
    "kv_cache_stats_json": [_P, _P, _Z, _COUNT],
}

# The same of kvasir_experimental.h; kvasir.experimental binds them.
EXPERIMENTAL_CALLS: Dict[str, List[Any]] = {
    "kv_session_measure": [_P, _U32],
    "kv_prefill_logits": [_P, _P, _Z, _P, _CONTROL],
}

# Other functions: what they return, and the types of their parameters.
OTHERS: Dict[str, Tuple[Any, List[Any]]] = {
    "kv_init": (None, [_P, _Z]),
    "kv_status_text": (_S, [c_int32]),
    "kv_status_is_stale": (c_int32, [c_int32]),
    "kv_version": (_U32, []),
    "kv_build_info": (_S, []),
    "kv_cancel_fire": (None, [_P]),
    "kv_cancel_reset": (None, [_P]),
    "kv_cancel_release": (None, [_P]),
    "kv_strategy_destroy": (None, [_P]),
    "kv_model_retain": (_P, [_P]),
    "kv_close": (None, [_P]),
    "kv_session_close": (None, [_P]),
    "kv_library_close": (None, [_P]),
    "kv_cache_close": (None, [_P]),
}


def bind(library: ctypes.CDLL, calls: Dict[str, List[Any]]) -> None:
    """Declares functions that return a kv_status."""
    for name, parameters in calls.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int32, [*parameters, _ERROR]


def _load() -> ctypes.CDLL:
    """Loads the library of this package, or else the one that the system's loader finds.

    Calls release the interpreter's lock.
    """
    packed = pathlib.Path(__file__).parent / "lib" / LIBRARY
    try:
        library = ctypes.CDLL(str(packed) if packed.exists() else LIBRARY)
    except OSError as error:
        raise ImportError(
            f"{error}: install Kvasir's wheel, or put the folder of {LIBRARY} into LD_LIBRARY_PATH"
        ) from error
    library.kv_version.restype = c_uint32
    found = library.kv_version()
    if found // 100 != HEADER_VERSION // 100:  # another minor version is another ABI: docs/abi.md
        raise ImportError(f"{LIBRARY} has version {found}, not {HEADER_VERSION}: install that one")
    bind(library, CALLS)
    for name, (result, parameters) in OTHERS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


lib = _load()
