"""Training loops for Equinox whose loss may change and whose step compiles once."""

# In the order of the documentation.
# ruff: noqa: I001
from trainer._trainer import Trainer as Trainer
from trainer._state import TrainState as TrainState
from trainer._result import FitResult as FitResult
from trainer._history import History as History

from trainer._switch import (
    switch_every as switch_every,
    alternate as alternate,
    piecewise as piecewise,
    Switch as Switch,
)
from trainer._weighted_sum import WeightedSum as WeightedSum
from trainer._losses import AbstractLoss as AbstractLoss
from trainer._selectors import (
    Every as Every,
    Cycle as Cycle,
    At as At,
    AbstractSelector as AbstractSelector,
)
from trainer._update import Minimize as Minimize, AbstractUpdate as AbstractUpdate

from trainer.data import Arrays as Arrays, Loader as Loader

from trainer.callbacks import Evaluate as Evaluate
from trainer._callback import (
    AbstractCallback as AbstractCallback,
    StepInfo as StepInfo,
    Stop as Stop,
)

from trainer._types import RecompileError as RecompileError
from trainer._explain import TraceError as TraceError


__version__ = "0.1.0"
