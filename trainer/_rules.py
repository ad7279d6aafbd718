"""Rules that weigh the terms of a sum of losses, and those that need no gradient."""

import abc
from typing import Any, ClassVar, final, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PyTree

from trainer._counts import is_number, positive_int


Needs = Literal["values", "gradients", "traces"]

_RANGES = {
    "that is finite": np.isfinite,
    "above 0": lambda x: x > 0,
    "at least 0": lambda x: x >= 0,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "above 0 and up to 1": lambda x: 0 < x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
}


class Seen(NamedTuple):
    """What a rule may look at when it renews its weights.

    Attributes:
        values: The unweighted losses at this step, one float a term.
        gradients: A tuple of one gradient a term, shaped like the model and None where
            it has no parameter; given to a rule that needs `"gradients"`.
        traces: The trace of each term's neural tangent kernel, one float a term; given
            to a rule that needs `"traces"`.
    """

    values: Array
    gradients: Any = None
    traces: Any = None


class AbstractRule(eqx.Module):
    """Weighs the terms of a sum of losses by how training goes.

    Subclass it for a rule of your own. `init` makes the rule's memory, `weights` reads
    the weights from it, and `renew`, which is traced, gives the next memory. By default
    the memory is a dict whose `"weights"` are the weights, and they start at 1.

    The rules here keep their weights finite. Each says what it does with a loss, a
    gradient or a trace of 0; a weight that would become inf or NaN stays as it was.

    Attributes:
        every: Renew every so many steps, at least 1. The first renewal is at step 0.
        needs: What a renewal looks at beside the losses' values.
        delayed: Whether renewed weights act from the next step on, and not at once.
    """

    every: eqx.AbstractVar[int]
    needs: ClassVar[Needs] = "values"
    delayed: ClassVar[bool] = False

    def init(self, num: int) -> PyTree:
        """Make the memory before the first renewal, for `num` terms."""
        return {"weights": jnp.ones(num, float)}

    def weights(self, memory: PyTree) -> Array:
        """Read the terms' weights, one float a term."""
        return memory["weights"]

    @abc.abstractmethod
    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Give the next memory, of the structure, shapes and dtypes of `memory`."""

    def offset(self, memory: PyTree) -> Array:
        """What to add to the weighted sum; 0 by default."""
        del memory
        return jnp.zeros((), float)

    def check(self, num: int) -> None:
        """Raise ValueError if this rule cannot drive `num` terms."""
        if num < 1:
            raise ValueError(f"`{type(self).__name__}` weighs {num} terms. Give one.")


def number(rule: AbstractRule, name: str, value: Any, wanted: str) -> float:
    """Check that a hyperparameter is a number in a range; return it as a float."""
    what = f"`{name}` of `{type(rule).__name__}` is `{value!r}`"
    if not is_number(value):
        raise TypeError(f"{what}, not a number. Give a number {wanted}.")
    if not (np.isfinite(value) and _RANGES[wanted](value)):
        raise ValueError(f"{what}, which is out of range. Give a number {wanted}.")
    return float(value)


def approach(old: Array, new: Array, share: float) -> Array:
    """Move each weight toward its new value, unless that is not positive and finite."""
    usable = jnp.isfinite(new) & (new > 0)
    return jnp.where(usable, (1 - share) * old + share * new, old)


def if_finite(checked: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Take `new` if every number in `checked` is finite, and `old` otherwise."""
    finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(checked)])
    return jax.tree.map(lambda n, o: jnp.where(finite.all(), n, o), new, old)


def _no_losses(num: int) -> PyTree:
    first, last = jnp.zeros(num, float), jnp.zeros(num, float)
    return {"first": first, "last": last, "started": jnp.zeros((), bool)}


def _remember(memory: PyTree, weights: Array, values: Array) -> PyTree:
    """Take the weights, but those of the first renewal: it has no earlier losses."""
    started = memory["started"]
    new = {
        "weights": jnp.where(started, weights, memory["weights"]),
        "first": jnp.where(started, memory["first"], values),
        "last": values,
        "started": jnp.ones_like(started),
    }
    return if_finite(new, new, memory)


@final
class SoftAdapt(AbstractRule):
    """Give more weight to the losses that fall least, or rise.

    A loss's rate is its change since the last renewal, and the weights are
    `softmax(beta * rates)`: they add up to 1, and are equal until the second renewal.
    Rates that are all 0 give equal weights. A share too small for the dtype is 0.

    Attributes:
        beta: How far rates set weights apart, finite. Below 0 the losses that fall most
            get the more weight; 0 gives equal weights.
        normalized: Divide the rates by the sum of their absolute values.
        loss_weighted: Multiply shares by the mean of the two losses, taken as 0 if it
            is below, and scale them to add up to 1. If all are 0, leave the shares.

    Raises:
        TypeError: `beta` is not a number, or another is not a bool.
        ValueError: `beta` is not finite.

    Example:
        >>> rule = SoftAdapt(beta=1.0)
        >>> memory = rule.init(2)
        >>> for values in ([1.0, 3.0], [1.0, 2.0]):
        ...     memory = rule.renew(memory, Seen(jnp.array(values)), key=jr.key(0))
        >>> [round(w, 3) for w in rule.weights(memory).tolist()]
        [0.731, 0.269]

    Source:
        Heydari, Thompson and Mehmood, "SoftAdapt: Techniques for Adaptive Loss
        Weighting of Neural Networks with Multi-Part Loss Functions", 2019,
        arXiv:1912.12355, section 3.1.
    """

    beta: float
    normalized: bool
    loss_weighted: bool
    every: int

    def __init__(
        self,
        beta: float = 0.1,
        normalized: bool = False,
        loss_weighted: bool = False,
        every: int = 1,
    ):
        self.beta = number(self, "beta", beta, "that is finite")
        choices = normalized, loss_weighted
        if not all(isinstance(choice, bool) for choice in choices):
            raise TypeError(f"The choices of `SoftAdapt` are `{choices}`. Give bools.")
        self.normalized, self.loss_weighted = choices
        self.every = positive_int(every, "`every` of `SoftAdapt`")

    def init(self, num: int) -> PyTree:
        """Make a memory of equal weights and no losses."""
        return {"weights": jnp.full(num, 1 / num, float), **_no_losses(num)}

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Weigh by the losses' change; see `AbstractRule.renew`."""
        del key
        last = memory["last"]
        values = jnp.asarray(seen.values, last.dtype)
        rates = values - last
        if self.normalized:
            total = jnp.sum(jnp.abs(rates))
            rates = rates / jnp.where(total > 0, total, 1)
        scores = self.beta * rates
        if self.loss_weighted:
            means = jnp.maximum((values + last) / 2, 0)
            scores = scores + jnp.log(jnp.where(jnp.any(means > 0), means, 1))
        return _remember(memory, jax.nn.softmax(scores), values)


@final
class ReLoBRaLo(AbstractRule):
    """Give more weight to the losses that made least progress, with random lookbacks.

    Progress is the ratio of a loss to its value at the last renewal or, in a lookback,
    at the first. Weights start at 1 and add up to the number of terms. A term whose
    earlier loss is 0 counts as unchanged, with a ratio of 1.

    Attributes:
        temperature: How alike weights are, above 0. Toward 0, least progress wins all.
        alpha: The share kept of the past, from 0 to 1.
        lookback: The mean of the paper's rho, from 0 to 1: the chance that the past is
            the last weights. Otherwise it looks back: never at 1, always at 0.

    Raises:
        TypeError: One of them is not a number.
        ValueError: One is out of range.

    Example:
        >>> rule = ReLoBRaLo(temperature=1.0, alpha=0.5, lookback=1.0)
        >>> memory = rule.init(2)
        >>> for values in ([1.0, 2.0], [1.0, 1.0]):
        ...     memory = rule.renew(memory, Seen(jnp.array(values)), key=jr.key(0))
        >>> [round(w, 3) for w in rule.weights(memory).tolist()]
        [1.122, 0.878]

    Source:
        Bischof and Kraus, "Multi-Objective Loss Balancing for Physics-Informed Deep
        Learning", 2021, arXiv:2110.09813, equation 11; defaults of Table VIII, Burgers.
    """

    temperature: float
    alpha: float
    lookback: float
    every: int

    def __init__(
        self,
        temperature: float = 0.1,
        alpha: float = 0.999,
        lookback: float = 0.9999,
        every: int = 1,
    ):
        self.temperature = number(self, "temperature", temperature, "above 0")
        self.alpha = number(self, "alpha", alpha, "from 0 to 1")
        self.lookback = number(self, "lookback", lookback, "from 0 to 1")
        self.every = positive_int(every, "`every` of `ReLoBRaLo`")

    def init(self, num: int) -> PyTree:
        """Make a memory of weights of 1 and no losses."""
        return super().init(num) | _no_losses(num)

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Weigh by the losses' progress; see `AbstractRule.renew`."""
        values = jnp.asarray(seen.values, memory["last"].dtype)
        anew = self._balance(values, memory["first"])
        past = jnp.where(jr.bernoulli(key, self.lookback), memory["weights"], anew)
        recent = self._balance(values, memory["last"])
        weights = self.alpha * past + (1 - self.alpha) * recent
        return _remember(memory, weights, values)

    def _balance(self, values: Array, earlier: Array) -> Array:
        unknown = earlier == 0
        progress = jnp.where(unknown, 1, values / jnp.where(unknown, 1, earlier))
        return values.size * jax.nn.softmax(progress / self.temperature)


@final
class NTKTrace(AbstractRule):
    """Scale losses so that they converge at similar rates, by their tangent kernels.

    A term's weight is the sum of the traces of all kernels over the trace of its own.
    Weights start at 1 and have no upper bound. A term of trace 0 keeps its weight.

    Raises:
        TypeError: `every` is not a whole number.
        ValueError: `every` is below 1.

    Example:
        >>> rule = NTKTrace()
        >>> seen = Seen(jnp.array([1.0, 1.0]), traces=jnp.array([1.0, 4.0]))
        >>> rule.renew(rule.init(2), seen, key=jr.key(0))["weights"].tolist()
        [5.0, 1.25]

    Source:
        Wang, Yu and Perdikaris, "When and why PINNs fail to train: A neural tangent
        kernel perspective", 2022, arXiv:2007.14527, Algorithm 1.
    """

    every: int
    needs: ClassVar[Needs] = "traces"

    def __init__(self, every: int = 100):
        self.every = positive_int(every, "`every` of `NTKTrace`")

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Take the ratios of Algorithm 1; see `AbstractRule.renew`."""
        del key
        traces = jnp.asarray(seen.traces, float)
        return {"weights": approach(memory["weights"], jnp.sum(traces) / traces, 1.0)}
