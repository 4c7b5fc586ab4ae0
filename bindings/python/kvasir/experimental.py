"""Measurement and research: kvasir_experimental.h.

Nothing here is part of the interface's promise. Names, numbers and behaviour may change or
disappear in any version. The strategies "ivf", "infllm" and "snapkv" are experimental too.
Session.stats_json has the results of measure().
"""
from __future__ import annotations

import enum
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Dict, Optional

import numpy as np
import numpy.typing as npt

from . import _abi
from . import strategy as _strategy
from ._core import Watch, call, lib
from ._values import address, as_tokens, check_names, control
from .options import ControlOptions, takes
from .session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

_abi.bind(lib, _abi.EXPERIMENTAL_CALLS)


class Param(enum.IntEnum):
    """Experimental parameter of a strategy."""

    SEARCH_BREADTH = 1000
    HEAD_GRAPHS = 1001
    BUDGET_SCHEDULE = 1002
    FILTER_WINDOW = 1003


class BudgetSchedule(enum.IntEnum):
    """How a budget is spread over the layers that select. The mean stays the same."""

    UNIFORM = 0  # the same in all (default)
    LINEAR = 1  # linear, from 3/2 of the mean in the first layer to 1/2 in the last
    PYRAMID = 2  # linear, from 39/20 to 1/20 (PyramidKV)


class FilterWindow(enum.IntEnum):
    """Queries whose attention a filter layer selects by."""

    LAST = 0  # the newest (default)
    EXPONENTIAL = 1  # the newest 16, each with twice the weight of the one before it
    UNIFORM = 2  # the newest 16 with equal weights


class Measure(enum.IntFlag):
    """What measure() measures."""

    COMPARE = 1  # attend each decoded token exactly too, and compare
    LAYERS = 2  # also compare the layers with each other; implies COMPARE
    CERTIFY = 4  # bound the attention that was read from below


@dataclass(frozen=True, repr=False)
class Strategy(_strategy.Strategy):
    """Strategy with experimental parameters too; None is the strategy's default.

    search_breadth: "hnsw", "ood", "dipr-graph": tokens that a search keeps, at least 64; "ivf":
        clusters that it reads
    head_graphs: "ood", "dipr-graph": True: each query head of a group has its own graph
    budget_schedule: a BudgetSchedule
    filter_window: "filter-layers": a FilterWindow
    """

    search_breadth: Optional[int] = None
    head_graphs: Optional[bool] = None
    budget_schedule: Optional[BudgetSchedule] = None
    filter_window: Optional[FilterWindow] = None

    _params: ClassVar[Dict[str, int]] = {
        **_strategy.Strategy._params, **{param.name.lower(): param for param in Param}
    }


def measure(session: Session, flags: Measure) -> None:
    """Measures all decode from now on; Measure(0) stops it. docs/strategies.md has the results.

    Raises BadArgumentError (unknown flags), NoMemoryError, BusyError.
    """
    call(lib.kv_session_measure, session._live(), int(flags))


@takes(ControlOptions)
def prefill_logits(
    session: Session, tokens: npt.ArrayLike, **options: Unpack[ControlOptions]
) -> npt.NDArray[np.float32]:
    """Appends tokens as Session.prefill_tokens does and returns the logits at each.

    float32 [count][vocabulary]. After a failure whole chunks stay, as Session.tokens shows.
    """
    owner, watch, ids = session._live(), Watch(), as_tokens(tokens)
    check_names(ControlOptions, options)
    logits = np.empty((ids.size, session._vocabulary), np.float32)
    how = control(options, watch)
    watch.run(
        lib.kv_prefill_logits, owner, address(ids), ids.size, address(logits), byref(how)
    )
    return logits
