"""Training loops for Equinox whose loss may change and whose step compiles once."""

# In the order of the documentation.
# ruff: noqa: I001
from trainer._trainer import Trainer as Trainer
from trainer._ensemble import ensemble as ensemble, Ensemble as Ensemble
from trainer._state import TrainState as TrainState
from trainer._result import FitResult as FitResult
from trainer.recompiles._report import CompileReport as CompileReport
from trainer.preflight._preflight import Preflight as Preflight
from trainer._history import History as History
from trainer._guard import NonfiniteSteps as NonfiniteSteps

from trainer._switch import (
    switch_every as switch_every,
    alternate as alternate,
    piecewise as piecewise,
    Switch as Switch,
)
from trainer._weighted_sum import WeightedSum as WeightedSum
from trainer._losses import AbstractLoss as AbstractLoss
from trainer._adaptive_sum import AdaptiveSum as AdaptiveSum
from trainer._gradient_rules import (
    GradNorm as GradNorm,
    LearningRateAnnealing as LearningRateAnnealing,
    GradientBalance as GradientBalance,
    Uncertainty as Uncertainty,
)
from trainer._rules import (
    SoftAdapt as SoftAdapt,
    ReLoBRaLo as ReLoBRaLo,
    NTKTrace as NTKTrace,
    AbstractRule as AbstractRule,
    Seen as Seen,
)
from trainer._mean_square import MeanSquare as MeanSquare
from trainer._schedules import Anneal as Anneal
from trainer._preview import preview as preview, Preview as Preview
from trainer._selectors import Every as Every, Cycle as Cycle, At as At
from trainer._random import Random as Random
from trainer._advancing import Plateau as Plateau, Threshold as Threshold
from trainer._selectors import (
    AbstractSelector as AbstractSelector,
    Outcome as Outcome,
    Report as Report,
)

from trainer._minimize import Minimize as Minimize
from trainer._parts import Parts as Parts, Part as Part
from trainer._switch_update import (
    SwitchUpdate as SwitchUpdate,
    JointUpdate as JointUpdate,
)
from trainer._update import AbstractUpdate as AbstractUpdate

from trainer._averages import EMA as EMA, SWA as SWA
from trainer._transforms import (
    Target as Target,
    Project as Project,
    AbstractTransform as AbstractTransform,
)

from trainer.data import (
    Arrays as Arrays,
    Loader as Loader,
    AbstractSampler as AbstractSampler,
)

from trainer.callbacks import (
    Evaluate as Evaluate,
    profile as profile,
    Profile as Profile,
)
from trainer._callback import (
    AbstractCallback as AbstractCallback,
    StepInfo as StepInfo,
    Stop as Stop,
)

from trainer._guard import NonfiniteError as NonfiniteError
from trainer._types import RecompileError as RecompileError
from trainer.mistakes._trace_errors import TraceError as TraceError
from trainer.mistakes._silent import LossWarning as LossWarning
from trainer.recompiles._why import explain as explain, Explanation as Explanation
from trainer.recompiles._differences import Difference as Difference
from trainer.recompiles._call import Call as Call


__version__ = "0.1.0"
