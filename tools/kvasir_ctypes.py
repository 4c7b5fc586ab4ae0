"""The part of include/kvasir.h that the tools of this folder call, through ctypes."""
import ctypes
import pathlib
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

PHASE_PREFILL = 2
LIMIT = 6  # KV_LIMIT
TEXT_FN = ctypes.CFUNCTYPE(c_int32, c_void_p, c_size_t, c_void_p)
PROGRESS_FN = ctypes.CFUNCTYPE(c_int32, c_int32, c_uint64, c_uint64, c_void_p)


class Error(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class _Error(ctypes.Structure):
    _fields_ = [("status", c_int32), ("sys_errno", c_int32), ("offset", c_uint64), ("message", c_char * 384)]


class _SessionOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("context", c_uint64), ("kv_type", c_uint32), ("window", c_uint32),
                ("prefill_chunk", c_uint32), ("dense_layers", c_uint32), ("strategy", c_char_p), ("budget_tokens", c_uint64),
                ("budget_fraction", c_double), ("share_heads", c_uint32), ("reserved", c_uint32), ("log", c_void_p),
                ("log_user", c_void_p)]


class _CallOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("cancel", c_void_p), ("progress", PROGRESS_FN),
                ("progress_user", c_void_p)]


class _GenerateOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("max_tokens", c_uint32), ("temperature", c_float), ("top_k", c_uint32), ("top_p", c_float),
                ("min_p", c_float), ("repetition_penalty", c_float), ("keep", c_uint32), ("seed", c_uint64), ("stop", c_void_p),
                ("stop_count", c_uint32), ("flags", c_uint32), ("cancel", c_void_p), ("progress", PROGRESS_FN),
                ("progress_user", c_void_p)]


class Answer(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("stop_reason", c_uint32), ("question_tokens", c_uint64), ("answer_tokens", c_uint64),
                ("first_token_ns", c_uint64), ("total_ns", c_uint64), ("tokens_read", c_uint64), ("tokens_present", c_uint64)]


class Library:
    """libkvasir.so; every call raises Error when it does not return KV_OK."""

    def __init__(self, path):
        self._lib = ctypes.CDLL(str(pathlib.Path(path).resolve()))
        self._lib.kv_build_info.restype = c_char_p
        for name in ("kv_close", "kv_session_close"):
            function = getattr(self._lib, name)
            function.argtypes, function.restype = [c_void_p], None

    def build_info(self):
        return self._lib.kv_build_info().decode()

    def call(self, name, *arguments):
        error = _Error()
        status = getattr(self._lib, name)(*arguments, byref(error))
        if status:
            raise Error(status, error.message.decode(errors="replace"))

    def options(self, kind, init):
        options = kind()
        function = getattr(self._lib, init)
        function.argtypes, function.restype = [POINTER(kind)], None
        function(byref(options))
        if options.struct_size != ctypes.sizeof(kind):
            raise RuntimeError(f"{init}: the library's struct has {options.struct_size} bytes, this file's {ctypes.sizeof(kind)}")
        return options

    def close(self, name, handle):
        getattr(self._lib, name)(handle)


class _Handle:
    """Closes itself at the end of a with block."""
    _close = ""

    def __init__(self, library):
        self.library = library
        self.handle = c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.library.close(self._close, self.handle)
        self.handle = c_void_p()


class Model(_Handle):
    _close = "kv_close"

    def __init__(self, library, path):
        super().__init__(library)
        library.call("kv_open", str(path).encode(), None, byref(self.handle))

    def count_tokens(self, text):
        data = text.encode()
        count = c_size_t()
        try:
            self.library.call("kv_tokenize", self.handle, data, c_size_t(len(data)), c_uint32(0), None, c_size_t(0), byref(count))
        except Error as error:
            if error.status != LIMIT:  # which says that nothing fits in no room
                raise
        return count.value


class Session(_Handle):
    _close = "kv_session_close"

    def __init__(self, model, cache=None, threads=0, strategy=None, budget_tokens=0, budget_fraction=0.0, dense_layers=None,
                 share_heads=True):
        """Empty, or the timeline of a cache file."""
        super().__init__(model.library)
        options = self.library.options(_SessionOptions, "kv_session_options_init")
        options.threads = threads
        options.strategy = strategy.encode() if strategy else None
        options.budget_tokens = budget_tokens
        options.budget_fraction = budget_fraction
        options.share_heads = int(share_heads)
        if dense_layers is not None:
            options.dense_layers = dense_layers
        if cache is None:
            self.library.call("kv_session_open", model.handle, byref(options), byref(self.handle))
        else:
            self.library.call("kv_load", model.handle, str(cache).encode(), byref(options), None, byref(self.handle))

    def prefill(self, text, progress=None):
        """progress(tokens done, tokens in all)."""
        data = text.encode()
        options = self.library.options(_CallOptions, "kv_call_options_init")

        def report(phase, done, total, _):
            if progress and phase == PHASE_PREFILL:
                progress(done, total)
            return 0
        options.progress = PROGRESS_FN(report)
        self.library.call("kv_prefill", self.handle, data, c_size_t(len(data)), byref(options), None, None)

    def save(self, path):
        self.library.call("kv_save", self.handle, str(path).encode(), None)

    def ask(self, question, max_tokens):
        """(the greedy answer, its figures); the timeline is left as it was."""
        data = question.encode()
        options = self.library.options(_GenerateOptions, "kv_generate_options_init")
        options.max_tokens = max_tokens
        parts = []

        def on_text(text, size, _):
            parts.append(ctypes.string_at(text, size))
            return 0
        answer = Answer(struct_size=ctypes.sizeof(Answer))
        self.library.call("kv_generate", self.handle, data, c_size_t(len(data)), byref(options), TEXT_FN(on_text), None, byref(answer))
        return b"".join(parts).decode(errors="replace"), answer
