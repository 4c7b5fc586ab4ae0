"""Strategies: which sealed pages attention reads."""
from __future__ import annotations

from ctypes import byref, c_double, c_uint32
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Dict, Iterator, List, Optional, Sequence, Tuple

from . import _abi
from ._core import Owner, call, lib
from ._values import as_uint, result_of, sized, strategy_owner
from .enums import Param
from .errors import BadArgumentError, NotFoundError, bad_argument


@dataclass(frozen=True, repr=False)
class Strategy:
    """Strategy with its parameters: `Strategy("bounded", budget_fraction=0.05)`.

    Options named `decode` and `prefill` take one, or a name alone for its defaults. A parameter
    that the strategy does not have raises BadArgumentError. The call that takes the strategy
    refuses a parameter that its use (decode, prefill or a Cache) does not have.

    Names, and the parameters that each has (B: budget_tokens or budget_fraction; D: dense_layers;
    H: share_heads):

        "auto"           "full" up to 4096 sealed tokens, then "bounded"    B D H coverage
        "full"           everything                                         none
        "window"         sinks and window only                              D
        "bounded"        what a sketch of the keys finds, and a sample      B D H coverage
        "quest"          blocks with the largest upper bounds (Quest)       B D H select_tokens
        "flat"           tokens with the largest scores, by an int8 scan    B D H
        "dipr"           tokens above a share of the largest, by a scan     B D H alpha
        "dipr-graph"     the same, by the graph of "ood"                    B D H alpha
        "ood"            tokens found in a graph built from queries         B D H
                         (RetrievalAttention)
        "hnsw"           tokens found in a graph built from keys            B D H
        "filter-layers"  what a few layers choose for those after them      B layers
                         (OmniKV)

    Parameters; None is the strategy's default:

    budget_tokens: tokens per layer and head, as a mean over layers; at least 1
    budget_fraction: part of the sealed tokens, over 0 to 1. Default, with a minimum of 512 tokens:
        "bounded" 0.01, "quest", "flat", "ood" and "hnsw" 0.02, "filter-layers" 0.067. "dipr" and
        "dipr-graph": 0.1, at least 1024 tokens, as an upper limit. In prefill: 0.1, at least 2048
    dense_layers: layers with full attention. Default: "quest" 2, others 0
    share_heads: True (default): one selection per group of query heads; False: one per query head
    alpha: smallest attention to read, as a part of the largest token's; over 0 to 1. Default: 0.012
    coverage: 1 - the expected standard error of the sampled attention; between 0 and 1. Default:
        0.96 with the default budget; with another the budget alone decides
    select_tokens: neighbouring tokens selected together: a multiple of 16 (of 8 where head_dim is
        over 128, of 4 where it is over 256) up to 1024. Default: 16 (8, 4)
    exact_tokens: prefill only: exact tokens at the end of each prefill. Default: 0
    layers: the filter layers of "filter-layers", from 0, ascending. Default: three layers spread
        evenly (one in eight if the model has fewer than 24)
    """

    name: str = "auto"
    _: KW_ONLY
    budget_tokens: Optional[int] = None
    budget_fraction: Optional[float] = None
    dense_layers: Optional[int] = None
    share_heads: Optional[bool] = None
    alpha: Optional[float] = None
    coverage: Optional[float] = None
    select_tokens: Optional[int] = None
    exact_tokens: Optional[int] = None
    layers: Optional[Sequence[int]] = None

    _params: ClassVar[Dict[str, int]] = {param.name.lower(): param for param in Param}

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        self._owner()  # the library checks name and parameters

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._given())
        return f"{type(self).__name__}({self.name!r}{given})"

    def _given(self) -> Iterator[Tuple[str, Any]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value is not None:
                yield field.name, value

    def _owner(self) -> Owner:
        """Creates the kv_strategy."""
        if self.budget_tokens is not None and self.budget_fraction is not None:
            raise bad_argument("a strategy has budget_tokens or budget_fraction, not both")
        owner = strategy_owner(self.name)
        for name, value in self._given():
            if name != "layers":
                call(lib.kv_strategy_set, owner, self._params[name], float(value))
        if self.layers is not None:
            layers = [as_uint("a layer", layer, 32) for layer in self.layers]
            array = (c_uint32 * len(layers))(*layers)
            call(lib.kv_strategy_set_layers, owner, array, len(layers))
        return owner

    def parameters(self) -> Dict[str, float]:
        """Returns all parameters that the strategy has, except layers, with their values.

        A value is 0 where the default depends on the model or on another parameter. It is also 0
        for that of budget_tokens and budget_fraction which does not count.
        """
        owner, value, found = self._owner(), c_double(), {}
        for name, param in self._params.items():
            try:
                call(lib.kv_strategy_get, owner, param, byref(value))
            except BadArgumentError:
                continue
            found[name] = value.value
        return found


@dataclass(frozen=True)
class StrategyInfo:
    """Description of a strategy."""

    name: str
    budget_floor: int  # minimum tokens of the default budget_fraction; 0: no budget
    for_prefill: bool  # the option `prefill` takes it
    for_cache: bool  # a Cache takes it
    has_index: bool  # it searches an index, which Session.prepare builds
    is_experimental: bool  # it may disappear in any version


def strategies() -> List[StrategyInfo]:
    """Lists the strategies of the library. "auto", a choice between two, is not listed."""
    found: List[StrategyInfo] = []
    while True:
        info = sized(_abi.kv_strategy_info)
        try:
            call(lib.kv_strategy_list, len(found), byref(info))
        except NotFoundError:
            return found
        found.append(
            result_of(
                StrategyInfo,
                info,
                for_prefill=bool(info.flags & _abi.STRATEGY_PREFILL),
                for_cache=bool(info.flags & _abi.STRATEGY_CACHE),
                has_index=bool(info.flags & _abi.STRATEGY_INDEX),
                is_experimental=bool(info.flags & _abi.STRATEGY_EXPERIMENTAL),
            )
        )
