"""Models: weights, tokenizer and chat format of a GGUF file."""
from __future__ import annotations

from ctypes import byref, c_char_p, c_size_t, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional

import numpy as np
import numpy.typing as npt

from . import _abi
from ._core import Cancel, Handle, Watch, call, lib
from ._question import detokenize
from ._values import (
    address, as_bytes, as_string, as_tokens, as_uint, check_names, control, fill, log_of, result_of,
    sized,
)
from .checkpoint import Checkpoint, raw
from .enums import Status
from .errors import Error
from .options import ControlOptions, ModelOptions, Path, Progress, SessionOptions, Text, takes
from .session import Session

if TYPE_CHECKING:
    from .cache import Cache
    from typing_extensions import Unpack


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model."""

    layers: int  # transformer blocks
    width: int  # elements of the residual stream
    heads: int  # query heads per layer
    kv_heads: int  # KV heads per layer
    head_dim: int  # elements per head
    feed_forward: int  # elements of the FFN's hidden layer
    vocabulary: int  # tokens
    context_tokens: int  # length that the model was trained for
    parameters: int  # elements of all weights
    weight_bytes: int  # in the file
    kv_bytes_per_token: int  # with scales and page summaries
    architecture: str  # of the GGUF: "llama", "qwen3"
    name: str  # the model's own, truncated
    weights: str  # formats, most used first: "Q4_K Q6_K F32"
    tokenizer: str  # of the GGUF: "gpt2", "llama"
    chat_format: str  # a name for the option chat_format, or "custom"
    fingerprint: str  # of the weights; cache files belong to it
    hash: str  # of the whole file; empty while unknown (hash_directory, Model.hash)
    mtp_layers: int  # that predict one token more, for the option draft_tokens
    thinks: bool  # the option thinking of Session.ask can be set


def inspect_model(path: Path) -> ModelInfo:
    """Describes a model file. Reads metadata and no weights. Raises the errors of Model."""
    info = sized(_abi.kv_model_info)
    call(lib.kv_model_inspect, as_string("path", path), byref(info))
    return result_of(ModelInfo, info, thinks=bool(info.thinks))


class Model(Handle):
    """Weights (a mapped GGUF file), tokenizer and chat format.

    It serves any number of threads. It may be closed before its sessions. The file must not change
    while the model is open.
    """

    _kind, _free = "model", "kv_close"

    @takes(ModelOptions)
    def __init__(
        self, path: Path, *, cancel: Optional[Cancel] = None, **options: Unpack[ModelOptions]
    ) -> None:
        """Maps the file and checks its metadata. Pages of weights are read when they are used.

        cancel: a Cancel; fire() stops the call.

        Raises NotFoundError, PermissionDeniedError, IoError, CorruptError, UnsupportedError (not a
        GGUF file, or a feature that the message names), LimitError, NoMemoryError, DeviceError,
        Cancelled, BadArgumentError.
        """
        filled = fill(_abi.kv_model_options, ModelOptions, options)
        watch = Watch()
        how = control({"cancel": cancel}, watch)
        watch.run(
            lib.kv_open, as_string("path", path), byref(filled), byref(how),
            self._new(log_of(filled)),
        )

    def _about(self) -> str:
        info = self.info
        return f"{info.name!r}, {info.architecture}, {info.parameters} parameters"

    def retain(self) -> Model:
        """Returns another handle of the same model, which is closed separately."""
        owner, model = self._live(), Model._empty()
        model._new(owner.keep)
        model._live()._as_parameter_.value = lib.kv_model_retain(owner)
        return model

    @property
    def info(self) -> ModelInfo:
        """Description of the model."""
        info = sized(_abi.kv_model_info)
        call(lib.kv_model_get_info, self._live(), byref(info))
        return result_of(ModelInfo, info, thinks=bool(info.thinks))

    @takes(ControlOptions)
    def hash(self, **options: Unpack[ControlOptions]) -> str:
        """Hashes the whole model file, unless the hash is known, and returns the hash.

        Raises Cancelled, IoError, CorruptError (the file changed while it was open), NoMemoryError.
        """
        owner, watch = self._live(), Watch()
        check_names(ControlOptions, options)
        watch.run(lib.kv_model_hash, owner, byref(control(options, watch)))
        return self.info.hash

    def tokenize(
        self,
        text: Text,
        *,
        special: bool = False,
        bos: bool = False,
        document: bool = False,
        cancel: Optional[Cancel] = None,
    ) -> npt.NDArray[np.int32]:
        """Tokenizes text: int32 [count].

        special: True: text that spells a control token becomes that token
        bos: True: begin with the begin-of-text token where the model uses one
        document: True: begin as Session.prefill begins a document without instructions
        cancel: a Cancel; fire() stops the call

        Raises Cancelled, NoMemoryError.
        """
        owner, encoded, how = self._live(), as_bytes(text), control({"cancel": cancel})
        flags = _abi.TOKENIZE_SPECIAL if special else 0
        flags |= _abi.TOKENIZE_BOS if bos else 0
        flags |= _abi.TOKENIZE_DOCUMENT if document else 0
        count = c_size_t(len(encoded) // 3 + 16)
        while True:
            tokens = np.empty(count.value, np.int32)
            try:
                call(
                    lib.kv_tokenize, owner, encoded, len(encoded), flags, byref(how),
                    address(tokens), tokens.size, byref(count),
                )
                return tokens[: count.value]
            except Error as error:
                if error.status != Status.LIMIT or count.value <= tokens.size:
                    raise

    def detokenize(self, tokens: npt.ArrayLike, *, special: bool = False) -> bytes:
        """Returns the tokens' text as bytes, because tokens may end within a character.

        special: True: with the names of control tokens, which are omitted otherwise

        Raises BadArgumentError (an id outside the vocabulary), NoMemoryError.
        """
        flags = _abi.TOKENIZE_SPECIAL if special else 0
        return detokenize(self._live(), as_tokens(tokens), flags)

    def _session(self) -> Session:
        return Session._made(self._live(), self.info.vocabulary)

    @takes(SessionOptions)
    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """Creates a session with an empty sequence.

        Raises BadArgumentError (an option out of range, a parameter that does not fit),
        NoMemoryError, LimitError; with a memory_limit NotFoundError, PermissionDeniedError and
        NoSpaceError (spill_directory).
        """
        owner, session = self._live(), self._session()
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        call(
            lib.kv_session_open, owner, byref(filled), session._new(owner.keep, log_of(filled))
        )
        return session

    @takes(SessionOptions)
    def load(
        self,
        path: Path,
        *,
        tokens: int = 0,
        verify: bool = False,
        cancel: Optional[Cancel] = None,
        progress: Optional[Progress] = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Creates a session from a cache file by mapping it.

        Precision, window_tokens and chat format come from the file.

        tokens: only the first tokens of the file, as if no more had been prefilled; 0: all
        verify: True: verify the whole file now, not each page at its first use
        cancel: a Cancel; fire() stops the call
        progress: function of phase, done and total

        Raises NotFoundError; VersionError and ModelMismatchError (both `is_stale`); NotACacheError,
        CorruptError, ContextFullError, LimitError, Cancelled, and the errors of Model.session.
        """
        owner, session, watch = self._live(), self._session(), Watch()
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = _control(cancel, progress, watch, _abi.VERIFY if verify else 0)
        prefix = [as_uint("tokens", tokens, 64)] if tokens else []
        watch.run(
            lib.kv_load_prefix if tokens else lib.kv_load, owner, as_string("path", path), *prefix,
            byref(filled), byref(how), session._new(owner.keep, log_of(filled)),
        )
        return session

    @takes(SessionOptions)
    def compose(
        self,
        paths: Iterable[Path],
        *,
        max_documents: int = 0,
        cancel: Optional[Cancel] = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Creates a session over several cache files by mapping them; nothing is prefilled again.

        Answers attend all documents, or those that a choice by the question finds.
        Session.documents has them, and Passage.document refers to them. Session.save writes a small
        file that refers to them, which load takes; file_documents lists them.

        max_documents: that an answer attends; 0: up to 8. At least as many as there are
            documents: all, without a choice, if they fit
        cancel: a Cancel; fire() stops the call

        Raises UnsupportedError (the model or the strategy cannot), BadArgumentError (a file with a
        question), and the errors of load.
        """
        owner, session, watch = self._live(), self._session(), Watch()
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = _control(cancel, None, watch, 0)
        names = [as_string("path", path) for path in paths]
        composed = sized(_abi.kv_compose_options)
        composed.max_documents = as_uint("max_documents", max_documents, 32)
        composed.session = pointer(filled)
        watch.run(
            lib.kv_session_compose, owner, (c_char_p * len(names))(*names), len(names),
            byref(composed), byref(how), session._new(owner.keep, log_of(filled)),
        )
        return session

    @takes(SessionOptions)
    def session_from_cache(
        self,
        cache: Cache,
        tokens: npt.ArrayLike,
        *,
        document: bool = False,
        cancel: Optional[Cancel] = None,
        progress: Optional[Progress] = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Creates a session over a cache that another engine has filled. It shares the pages.

        Keys must be as the model's file makes them: after RoPE, with the file's channel order. GGUF
        files of the architecture "llama" interleave the halves that other formats rotate. The model
        prefills the newest tokens again and compares the keys.

        tokens: all tokens of the cache
        document: True: tokenize(document=True) made the tokens
        cancel: a Cancel; fire() stops the call
        progress: function of phase, done and total

        Raises BadArgumentError (another number of tokens; instructions), BadStateError (the step is
        incomplete), ModelMismatchError, ContextFullError, Cancelled, LimitError, CorruptError,
        NoMemoryError, BusyError.
        """
        owner, session, watch, ids = self._live(), self._session(), Watch(), as_tokens(tokens)
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        how = _control(cancel, progress, watch, _abi.TOKENIZE_DOCUMENT if document else 0)
        watch.run(
            lib.kv_session_from_cache, owner, cache._live(), address(ids), ids.size, byref(filled),
            byref(how), session._new(owner.keep, log_of(filled)),
        )
        return session

    @takes(SessionOptions)
    def session_from_checkpoint(
        self,
        cache: Cache,
        tokens: npt.ArrayLike,
        start: Checkpoint,
        end: Optional[Checkpoint] = None,
        *,
        document: bool = False,
        cancel: Optional[Cancel] = None,
        progress: Optional[Progress] = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Creates a session as session_from_cache, of a model with windows or recurrent layers.

        The cache has the layers that attend to all tokens. The model prefills the tokens from
        `start` on again and compares what it computes.

        start: windows and states at an earlier token, a few hundred tokens before the end
        end: those after all tokens, to be compared; None: they are not
        Other parameters, and errors: session_from_cache. BadArgumentError also: a checkpoint that
        is not of the model, has NaN or infinity, or is too near to the end.
        """
        owner, session, watch, ids = self._live(), self._session(), Watch(), as_tokens(tokens)
        filled = fill(_abi.kv_session_options, SessionOptions, options)
        first, last = raw(start), None if end is None else raw(end)
        how = _control(cancel, progress, watch, _abi.TOKENIZE_DOCUMENT if document else 0)
        watch.run(
            lib.kv_session_from_checkpoint, owner, cache._live(), byref(first),
            None if last is None else byref(last), address(ids), ids.size, byref(filled),
            byref(how), session._new(owner.keep, log_of(filled)),
        )
        return session


def _control(
    cancel: Optional[Cancel], progress: Optional[Progress], watch: Watch, flags: int
) -> Any:
    options: Dict[str, Any] = {"cancel": cancel, "progress": progress}
    return control(options, watch, flags)
