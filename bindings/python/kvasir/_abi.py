"""include/kvasir.h for ctypes: its structs, its functions, and the library itself. test/layout_test.py compares it with the header."""
from __future__ import annotations

import ctypes
import pathlib
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Tuple, Type

TEXT_FN = ctypes.CFUNCTYPE(c_int32, c_void_p, c_size_t, c_void_p)
PROGRESS_FN = ctypes.CFUNCTYPE(c_int32, c_int32, c_uint64, c_uint64, c_void_p)
LOG_FN = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

HEADER_VERSION = 100  # KV_VERSION_NUMBER
NO_OFFSET = 2**64 - 1

TOKENIZE_SPECIAL, TOKENIZE_BOS, TOKENIZE_DOCUMENT = 1, 2, 4
LOAD_VERIFY = 1
LIBRARY_VERIFY = 16
LIBRARY_REPLACE = 64


class kv_error(Structure):
    _fields_ = [("status", c_int32), ("sys_errno", c_int32), ("offset", c_uint64), ("message", c_char * 384)]


class kv_model_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("log", LOG_FN), ("log_user", c_void_p), ("chat_format", c_char_p),
                ("device", c_char_p), ("device_memory", c_uint64), ("cancel", c_void_p),
                ("hash_folder", c_char_p)]


class kv_model_information(Structure):
    _fields_ = [("struct_size", c_uint32), ("layers", c_uint32), ("width", c_uint32), ("heads", c_uint32), ("kv_heads", c_uint32),
                ("head_dim", c_uint32), ("feed_forward", c_uint32), ("vocabulary", c_uint32), ("context", c_uint64),
                ("parameters", c_uint64), ("weight_bytes", c_uint64), ("kv_bytes_per_token", c_uint64), ("architecture", c_char * 32),
                ("name", c_char * 64), ("weights", c_char * 96), ("tokenizer", c_char * 32), ("chat_format", c_char * 16),
                ("fingerprint", c_char * 72), ("hash", c_char * 40)]


class kv_session_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("context", c_uint64), ("kv_type", c_uint32), ("window", c_uint32),
                ("prefill_chunk", c_uint32), ("dense_layers", c_uint32), ("strategy", c_char_p), ("budget_tokens", c_uint64),
                ("budget_fraction", c_double), ("share_heads", c_uint32), ("alpha", c_float), ("log", LOG_FN), ("log_user", c_void_p),
                ("filter_layers", c_char_p), ("filter_window", c_uint32), ("compare", c_uint32), ("select_tokens", c_uint32),
                ("certify", c_uint32), ("prefill_strategy", c_char_p), ("prefill_budget_fraction", c_double),
                ("prefill_exact_tokens", c_uint64), ("coverage", c_float), ("search_breadth", c_uint32), ("budget_schedule", c_uint32),
                ("head_graphs", c_uint32), ("memory_budget", c_uint64), ("spill_folder", c_char_p)]


class kv_strategy_information(Structure):
    _fields_ = [("struct_size", c_uint32), ("dense_layers", c_uint32), ("budget_fraction", c_double), ("budget_floor", c_uint64),
                ("takes_budget", c_uint32), ("takes_select_tokens", c_uint32), ("name", c_char * 32), ("takes_coverage", c_uint32),
                ("takes_head_graphs", c_uint32)]


class kv_call_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("cancel", c_void_p), ("progress", PROGRESS_FN), ("progress_user", c_void_p)]


class kv_generate_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("max_tokens", c_uint32), ("temperature", c_float), ("top_k", c_uint32), ("top_p", c_float),
                ("min_p", c_float), ("repetition_penalty", c_float), ("keep", c_uint32), ("seed", c_uint64), ("stop", POINTER(c_char_p)),
                ("stop_count", c_uint32), ("flags", c_uint32), ("cancel", c_void_p), ("progress", PROGRESS_FN), ("progress_user", c_void_p),
                ("trace", c_uint32), ("reserved", c_uint32)]


class kv_span(Structure):
    _fields_ = [("first_token", c_uint64), ("tokens", c_uint64), ("share", c_float), ("reserved", c_uint32)]


class kv_answer(Structure):
    _fields_ = [("struct_size", c_uint32), ("stop_reason", c_uint32), ("question_tokens", c_uint64), ("answer_tokens", c_uint64),
                ("first_token_ns", c_uint64), ("total_ns", c_uint64), ("tokens_read", c_uint64), ("tokens_present", c_uint64)]


class kv_file_information(Structure):
    _fields_ = [("struct_size", c_uint32), ("format_version", c_uint32), ("file_bytes", c_uint64), ("tokens", c_uint64),
                ("sealed_tokens", c_uint64), ("kv_bytes", c_uint64), ("layers", c_uint32), ("kv_heads", c_uint32), ("head_dim", c_uint32),
                ("kv_type", c_uint32), ("model_name", c_char * 64), ("chat_format", c_char * 32)]


class kv_pack_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("level", c_uint32), ("cancel", c_void_p), ("progress", PROGRESS_FN), ("progress_user", c_void_p)]


class kv_packed_information(Structure):
    _fields_ = [("struct_size", c_uint32), ("packed_version", c_uint32), ("file_bytes", c_uint64), ("document_bytes", c_uint64),
                ("tokens", c_uint64), ("format_version", c_uint32), ("level", c_uint32), ("layers", c_uint32), ("kv_heads", c_uint32),
                ("head_dim", c_uint32), ("reserved", c_uint32), ("model_name", c_char * 64)]


class kv_library_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("max_bytes", c_uint64), ("log", LOG_FN), ("log_user", c_void_p)]


class kv_library_document(Structure):
    _fields_ = [("struct_size", c_uint32), ("status", c_int32), ("file_bytes", c_uint64), ("tokens", c_uint64), ("last_used", c_uint64),
                ("name", c_char * 208), ("model_name", c_char * 64), ("fingerprint", c_char * 72)]


class kv_library_session_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("name", c_char_p), ("session", POINTER(kv_session_options)),
                ("cancel", c_void_p), ("progress", PROGRESS_FN), ("progress_user", c_void_p)]


class kv_library_result(Structure):
    _fields_ = [("struct_size", c_uint32), ("save_status", c_int32), ("tokens", c_uint64), ("tokens_found", c_uint64), ("saved", c_uint32),
                ("name", c_char * 212)]


class kv_cache_shape(Structure):
    _fields_ = [("struct_size", c_uint32), ("layers", c_uint32), ("heads", c_uint32), ("kv_heads", c_uint32), ("head_dim", c_uint32),
                ("reserved", c_uint32), ("max_tokens", c_uint64), ("identity", c_uint8 * 32)]


class kv_cache_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("kv_type", c_uint32), ("window", c_uint32), ("dense_layers", c_uint32),
                ("share_heads", c_uint32), ("strategy", c_char_p), ("budget_tokens", c_uint64), ("budget_fraction", c_double),
                ("filter_layers", c_char_p), ("alpha", c_float), ("coverage", c_float), ("select_tokens", c_uint32), ("reserved", c_uint32),
                ("memory_budget", c_uint64), ("spill_folder", c_char_p)]


class kv_cache_attention_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("scale", c_float), ("softcap", c_float), ("cancel", c_void_p)]


_S, _P, _Z = c_char_p, c_void_p, c_size_t
_OUT = POINTER(c_void_p)
_ERROR = POINTER(kv_error)
_CALL = POINTER(kv_call_options)

# Those that return a kv_status: the types of their parameters but for the last one, which is a kv_error.
_CALLS: Dict[str, List[Any]] = {
    "kv_cancel_create": [_OUT],
    "kv_open": [_S, POINTER(kv_model_options), _OUT],
    "kv_model_info": [_P, POINTER(kv_model_information)],
    "kv_model_inspect": [_S, POINTER(kv_model_information)],
    "kv_model_hash": [_P, _CALL],
    "kv_tokenize": [_P, _S, _Z, c_uint32, _P, _P, _Z, POINTER(_Z)],
    "kv_detokenize": [_P, _P, _Z, c_uint32, _P, _Z, POINTER(_Z)],
    "kv_strategy_info": [c_uint32, POINTER(kv_strategy_information)],
    "kv_session_open": [_P, POINTER(kv_session_options), _OUT],
    "kv_session_set_strategy": [_P, _S, c_uint64, c_double],
    "kv_prepare": [_P, _CALL],
    "kv_prefill": [_P, _S, _Z, _CALL, POINTER(c_uint64), POINTER(c_uint64)],
    "kv_prefill_tokens": [_P, _P, _Z, _CALL, POINTER(c_uint64)],
    "kv_prefill_logits": [_P, _P, _Z, _P, _CALL],
    "kv_generate": [_P, _S, _Z, POINTER(kv_generate_options), TEXT_FN, _P, POINTER(kv_answer)],
    "kv_next": [_P, POINTER(kv_generate_options), POINTER(c_int32), POINTER(c_int32)],
    "kv_score": [_P, _P, _Z, _P, _CALL],
    "kv_session_tokens": [_P, _P, _Z, POINTER(_Z)],
    "kv_rewind": [_P, c_uint64],
    "kv_trace": [_P, _P, _Z, POINTER(_Z)],
    "kv_fork": [_P, _OUT],
    "kv_stats": [_P, _P, _Z, POINTER(_Z)],
    "kv_save": [_P, _S, _CALL],
    "kv_load": [_P, _S, POINTER(kv_session_options), _CALL, _OUT],
    "kv_load_prefix": [_P, _S, c_uint64, POINTER(kv_session_options), _CALL, _OUT],
    "kv_file_inspect": [_S, POINTER(kv_file_information)],
    "kv_file_verify": [_S, _CALL],
    "kv_pack": [_S, _S, POINTER(kv_pack_options)],
    "kv_unpack": [_S, _S, POINTER(kv_pack_options)],
    "kv_packed_inspect": [_S, POINTER(kv_packed_information)],
    "kv_library_open": [_S, POINTER(kv_library_options), _OUT],
    "kv_library_list": [_P, c_uint32, POINTER(kv_library_document)],
    "kv_library_session": [_P, _P, _S, _Z, POINTER(kv_library_session_options), _OUT, POINTER(kv_library_result)],
    "kv_library_rename": [_P, _S, _S],
    "kv_library_remove": [_P, _S],
    "kv_cache_open": [POINTER(kv_cache_shape), POINTER(kv_cache_options), _OUT],
    "kv_cache_update": [_P, c_uint32, c_uint32, _P, _P, _P, c_uint32],
    "kv_cache_attention": [_P, c_uint32, c_uint32, _P, _P, c_uint32, POINTER(kv_cache_attention_options)],
    "kv_cache_truncate": [_P, c_uint64],
    "kv_cache_fork": [_P, _P, _OUT],
    "kv_cache_save": [_P, _S, _CALL],
    "kv_cache_load": [POINTER(kv_cache_shape), _S, POINTER(kv_cache_options), _CALL, _OUT],
    "kv_session_from_cache": [_P, _P, _P, _Z, POINTER(kv_session_options), _CALL, _OUT],
    "kv_cache_stats": [_P, _P, _Z, POINTER(_Z)],
}

_OTHERS: Dict[str, Tuple[Any, List[Any]]] = {  # name: what it returns, its parameters
    "kv_status_text": (_S, [c_int32]),
    "kv_status_is_stale": (c_int32, [c_int32]),
    "kv_version": (c_uint32, []),
    "kv_build_info": (_S, []),
    "kv_cancel_fire": (None, [_P]),
    "kv_cancel_reset": (None, [_P]),
    "kv_cancel_release": (None, [_P]),
    "kv_retain": (_P, [_P]),
    "kv_close": (None, [_P]),
    "kv_session_close": (None, [_P]),
    "kv_library_close": (None, [_P]),
    "kv_cache_close": (None, [_P]),
}

# Structs that a function of the library fills with defaults.
WITH_INIT: Tuple[Type[Structure], ...] = (kv_model_options, kv_session_options, kv_call_options, kv_generate_options, kv_pack_options,
                                          kv_library_options, kv_library_session_options, kv_cache_options, kv_cache_attention_options)


def _load() -> ctypes.CDLL:
    """The library that came in this package, or else the one that the system's loader finds. Calls release the interpreter's lock."""
    packed = pathlib.Path(__file__).parent / "lib" / "libkvasir.so.0"
    library = ctypes.CDLL(str(packed) if packed.exists() else packed.name)
    for name, parameters in _CALLS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int32, [*parameters, _ERROR]
    for name, (result, parameters) in _OTHERS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    for struct in WITH_INIT:
        function = getattr(library, struct.__name__ + "_init")
        function.restype, function.argtypes = None, [_P, c_size_t]
    return library


lib = _load()
