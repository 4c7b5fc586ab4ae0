"""Models: weights, tokenizer and chat format of a GGUF file."""
from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t
from typing import TYPE_CHECKING, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Cancel, Handle, Watch, address, as_bytes, as_string, as_tokens, as_uint, call, fill, lib, log_of, sized, values
from .enums import Status
from .errors import Error
from .options import CallOptions, ModelOptions, Path, Progress, SessionOptions, Text
from .session import Session

if TYPE_CHECKING:
    from .cache import Cache
    from typing_extensions import Unpack


class ModelInformation(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int  # tokens
    context: int  # tokens the model was trained for
    parameters: int
    weight_bytes: int  # in the file
    kv_bytes_per_token: int  # in the store, scales and summaries included
    architecture: str
    name: str
    weights: str  # number formats, most used first
    tokenizer: str
    chat_format: str
    fingerprint: str  # of the weights; saved documents belong to it
    hash: str  # of the whole file; empty until it is known (hash_folder, Model.hash)


def inspect_model(path: Path) -> ModelInformation:
    """What a GGUF file is, without opening it for use: reads metadata and no weights."""
    info = sized(_abi.kv_model_information)
    call(lib.kv_model_inspect, as_string("path", path), byref(info))
    return ModelInformation(**values(info))


class Model(Handle):
    """A mapped GGUF file. It may be used by any number of threads, and closed before its sessions."""

    _kind, _free = "model", "kv_close"

    def __init__(self, path: Path, **options: Unpack[ModelOptions]) -> None:
        """Checks metadata and tensor shapes; weights are read when they are used. The file must not be changed while the model is open.

        NotFound, Permission, IoError, Corrupt, Unsupported (with the name of what is not supported), NoMemory, DeviceError."""
        filled = fill(_abi.kv_model_options, ModelOptions, options)
        call(lib.kv_open, as_string("path", path), byref(filled), self._new(log_of(filled)))

    def retain(self) -> Model:
        """Another handle of the same model, to be closed as well."""
        owner, model = self._live(), Model._empty()
        model._new(owner.keep)
        model._live()._as_parameter_.value = lib.kv_retain(owner)
        return model

    @property
    def info(self) -> ModelInformation:
        info = sized(_abi.kv_model_information)
        call(lib.kv_model_info, self._live(), byref(info))
        return ModelInformation(**values(info))

    def hash(self, **options: Unpack[CallOptions]) -> None:
        """Reads the whole file and computes its hash, unless it is known; `info` then has it. Cancelled, IoError, Corrupt, NoMemory."""
        owner, watch = self._live(), Watch()
        watch.run(lib.kv_model_hash, owner, byref(fill(_abi.kv_call_options, CallOptions, options, watch)))

    def tokenize(self, text: Text, *, special: bool = False, bos: bool = False, document: bool = False,
                 cancel: Optional[Cancel] = None) -> npt.NDArray[np.int32]:
        """Ids, int32 [count]. `special`: text that spells a control token becomes that token. `bos`: begin as the model wants it. `document`: as a new
        session's prefill reads the text, with the opening of the chat format's turn. Cancelled."""
        owner, encoded, token = self._live(), as_bytes(text), None if cancel is None else cancel._live()
        flags = (_abi.TOKENIZE_SPECIAL if special else 0) | (_abi.TOKENIZE_BOS if bos else 0)
        flags |= _abi.TOKENIZE_DOCUMENT if document else 0
        count = c_size_t(len(encoded) // 3 + 16)
        while True:
            tokens = np.empty(count.value, np.int32)
            try:
                call(lib.kv_tokenize, owner, encoded, len(encoded), flags, token, address(tokens), tokens.size, byref(count))
                return tokens[: count.value]
            except Error as error:
                if error.status != Status.LIMIT or count.value <= tokens.size:
                    raise

    def detokenize(self, tokens: npt.ArrayLike, *, special: bool = False) -> bytes:
        """The reverse. Bytes, because tokens may end within a character. `special`: with the names of control tokens."""
        owner, ids = self._live(), as_tokens(tokens)
        flags = _abi.TOKENIZE_SPECIAL if special else 0
        size = c_size_t(8 * ids.size + 16)
        while True:
            room = ctypes.create_string_buffer(size.value)
            try:
                call(lib.kv_detokenize, owner, address(ids), ids.size, flags, room, len(room), byref(size))
                return room.raw[: size.value]
            except Error as error:
                if error.status != Status.LIMIT or size.value <= len(room):
                    raise

    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """An empty sequence. BadArgument (unknown strategy, ranges), NoMemory, Limit."""
        owner, session, filled = self._live(), Session._made(self.info.vocabulary), fill(_abi.kv_session_options, SessionOptions, options)
        call(lib.kv_session_open, owner, byref(filled), session._new(owner.keep, log_of(filled)))
        return session

    def load(self, path: Path, *, tokens: int = 0, verify: bool = False, cancel: Optional[Cancel] = None,
             progress: Optional[Progress] = None, **options: Unpack[SessionOptions]) -> Session:
        """A session over a saved sequence, mapped: its pages are read when they are used, their checksums now. `tokens`: only so many first ones, as if no more had
        been read; 0: all. `verify`: check the whole file now, not each part when it is first used.

        NotFound; Version and ModelMismatch (both `is_stale`); NotACache, Corrupt, ContextFull, Limit, IoError, NoMemory, Cancelled."""
        owner, session, watch = self._live(), Session._made(self.info.vocabulary), Watch()
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = fill(_abi.kv_call_options, CallOptions, {"cancel": cancel, "progress": progress}, watch)
        how.flags = _abi.LOAD_VERIFY if verify else 0
        begin = [as_uint("tokens", tokens, 64)] if tokens else []
        watch.run(lib.kv_load_prefix if tokens else lib.kv_load, owner, as_string("path", path), *begin, byref(filled), byref(how),
                  session._new(owner.keep, log_of(filled)))
        return session

    def session_from_cache(self, cache: Cache, tokens: npt.ArrayLike, *, document: bool = False, cancel: Optional[Cancel] = None,
                           progress: Optional[Progress] = None, **options: Unpack[SessionOptions]) -> Session:
        """A session over the keys and values of `tokens` that another engine has put into a cache, whose pages it shares. Keys are those of the model's
        file: in files of the architecture "llama" two halves that other formats rotate are interleaved. `document`: the tokens are what
        tokenize(document=True) makes. The newest ones are read again and compared.

        BadArgument (another number of tokens), BadState (a step is not complete), ModelMismatch, ContextFull, Cancelled, Limit, Corrupt, NoMemory, Busy."""
        owner, session, watch, ids = self._live(), Session._made(self.info.vocabulary), Watch(), as_tokens(tokens)
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = fill(_abi.kv_call_options, CallOptions, {"cancel": cancel, "progress": progress}, watch)
        how.flags = _abi.TOKENIZE_DOCUMENT if document else 0
        watch.run(lib.kv_session_from_cache, owner, cache._live(), address(ids), ids.size, byref(filled), byref(how),
                  session._new(owner.keep, log_of(filled)))
        return session
