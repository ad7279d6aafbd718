"""Training loops for Equinox whose loss may change and whose step compiles once."""

from trainer._callback import (
    AbstractCallback as AbstractCallback,
    StepInfo as StepInfo,
    Stop as Stop,
)
from trainer._explain import TraceError as TraceError
from trainer._history import History as History
from trainer._losses import AbstractLoss as AbstractLoss
from trainer._result import FitResult as FitResult
from trainer._selectors import (
    AbstractSelector as AbstractSelector,
    At as At,
    Cycle as Cycle,
    Every as Every,
)
from trainer._state import TrainState as TrainState
from trainer._switch import (
    alternate as alternate,
    piecewise as piecewise,
    Switch as Switch,
    switch_every as switch_every,
)
from trainer._trainer import Trainer as Trainer
from trainer._types import RecompileError as RecompileError
from trainer._update import AbstractUpdate as AbstractUpdate, Minimize as Minimize
from trainer._weighted_sum import WeightedSum as WeightedSum
from trainer.callbacks import Evaluate as Evaluate
from trainer.data import Arrays as Arrays, Loader as Loader


__version__ = "0.1.0"
