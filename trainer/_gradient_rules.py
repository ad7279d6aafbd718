"""Rules that balance the terms' gradients, and one that learns the terms' noise."""

from collections.abc import Callable
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from trainer._counts import positive_int
from trainer._rules import AbstractRule, approach, if_finite, Needs, number, Seen


def _norm(gradient: PyTree, order: float = 2) -> Array:
    """The norm of all entries together: of order 1, 2 or infinity."""
    sizes = jax.tree.map(lambda leaf: jnp.abs(leaf).astype(float), gradient)
    return jnp.asarray(optax.tree.norm(sizes, order), float)


@final
class GradNorm(AbstractRule):
    """Learn weights under which every loss trains at a similar rate.

    The norm of each weighted gradient is pulled toward their mean times `r ** alpha`,
    where `r` is the term's loss over its first value, divided by the mean of that of
    all terms. Adam follows the sum of the absolute differences. Weights start at 1 and
    act from the next step on. Each renewal raises those below 1e-6 to it, so that all
    stay positive, and scales them to add up to the number of terms.

    A term whose gradient is 0 does not pull its weight. A loss below 0, or whose first
    value was not above 0, counts as unchanged; so do all if all are 0.

    Attributes:
        alpha: How strongly rates are made alike, at least 0. At 0 the norms are.
        learning_rate: How far Adam moves a weight in one renewal, above 0.
        where: Picks the part of the model whose gradient counts, as in `eqx.tree_at`,
            such as the last shared layer. By default all of it.

    Raises:
        TypeError: A number is not one, or `where` is not a function.
        ValueError: A number is out of range, or `where` picks no parameter.

    Example:
        >>> rule = GradNorm(learning_rate=0.1)
        >>> gradients = jnp.array([3.0]), jnp.array([1.0])
        >>> seen = Seen(jnp.array([1.0, 1.0]), gradients)
        >>> memory = rule.renew(rule.init(2), seen, key=jax.random.key(0))
        >>> [round(w, 3) for w in rule.weights(memory).tolist()]
        [0.9, 1.1]

    Source:
        Chen, Badrinarayanan, Lee and Rabinovich, "GradNorm: Gradient Normalization for
        Adaptive Loss Balancing in Deep Multitask Networks", 2018, arXiv:1711.02257,
        equations 1-2 and Algorithm 1; the defaults and Adam are of section 5.
    """

    alpha: float
    learning_rate: float
    where: Callable[[Any], Any] | None
    every: int
    needs: ClassVar[Needs] = "gradients"
    delayed: ClassVar[bool] = True

    def __init__(
        self,
        alpha: float = 1.5,
        learning_rate: float = 0.025,
        where: Callable[[Any], Any] | None = None,
        every: int = 1,
    ):
        if where is not None and not callable(where):
            raise TypeError(
                f"`where` of `GradNorm` is `{where!r}`, which picks nothing. Give a "
                "function of the model, as in `where=lambda m: m.layers[-1]`."
            )
        self.alpha = number(self, "alpha", alpha, "at least 0")
        self.learning_rate = number(self, "learning_rate", learning_rate, "above 0")
        self.where = where
        self.every = positive_int(every, "`every` of `GradNorm`")

    def init(self, num: int) -> PyTree:
        """Make a memory of weights of 1, Adam's state for them, and no losses."""
        weights = jnp.ones(num, float)
        return {
            "weights": weights,
            "opt_state": optax.adam(self.learning_rate).init(weights),
            "first": jnp.zeros(num, float),
            "started": jnp.zeros((), bool),
        }

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Follow the gradient of equation 2; see `AbstractRule.renew`."""
        del key
        weights, started = memory["weights"], memory["started"]
        values = jnp.asarray(seen.values, weights.dtype)
        first = jnp.where(started, memory["first"], values)
        norms = jnp.stack([_norm(self._part(g)) for g in seen.gradients])
        actual = weights * norms
        target = jnp.mean(actual) * _rates(values, first) ** self.alpha
        gradient = norms * jnp.sign(actual - target)
        optimizer = optax.adam(self.learning_rate)
        updates, state = optimizer.update(gradient, memory["opt_state"])
        weights = jnp.maximum(weights + jnp.asarray(updates), 1e-6)
        weights = weights * (weights.size / jnp.sum(weights))
        new = {"weights": weights, "opt_state": state, "first": first}
        new["started"] = jnp.ones_like(started)
        return if_finite((new, values), new, memory)

    def _part(self, gradient: PyTree) -> PyTree:
        part = gradient if self.where is None else self.where(gradient)
        if not jax.tree.leaves(part):
            raise ValueError(
                "`GradNorm` finds no parameter in the model, or in what `where` picks "
                "of it, so that no term has a gradient. Pick a layer that they share."
            )
        return part


def _rates(values: Array, first: Array) -> Array:
    """How slowly each term trains, relative to the mean: GradNorm's `r`."""
    known = (first > 0) & (values >= 0)
    ratios = jnp.where(known, values / jnp.where(known, first, 1), 1)
    mean = jnp.mean(ratios)
    return jnp.where(mean > 0, ratios / jnp.where(mean > 0, mean, 1), 1)


@final
class LearningRateAnnealing(AbstractRule):
    """Scale losses so that their gradients match the largest of a reference term's.

    A term's weight moves toward the largest absolute entry of the reference's gradient
    over the mean absolute entry of its own. Weights start at 1; that of the reference
    stays 1. The others have no upper bound. A term keeps its weight where its gradient
    or the reference's is 0.

    Attributes:
        alpha: The share of the new ratio in a renewed weight, above 0 and up to 1.
        reference: The index of the reference term, from 0: that of a PDE's residual.

    Raises:
        TypeError: `alpha` is not a number, or `reference` not a whole one.
        ValueError: One is out of range, or there is no term of index `reference`.

    Example:
        >>> rule = LearningRateAnnealing(alpha=0.5)
        >>> gradients = jnp.array([4.0, 1.0]), jnp.array([-1.0, 3.0])
        >>> seen = Seen(jnp.array([1.0, 1.0]), gradients)
        >>> rule.renew(rule.init(2), seen, key=jax.random.key(0))["weights"].tolist()
        [1.0, 1.5]

    Source:
        Wang, Teng and Perdikaris, "Understanding and Mitigating Gradient Flow
        Pathologies in Physics-Informed Neural Networks", 2021, arXiv:2001.04536,
        Algorithm 1, equations 40-41. Alpha is that of the published Algorithm 2.1,
        whose equation 2.30 has the mean of the weighted gradient instead.
    """

    alpha: float
    reference: int
    every: int
    needs: ClassVar[Needs] = "gradients"

    def __init__(self, alpha: float = 0.1, reference: int = 0, every: int = 10):
        self.alpha = number(self, "alpha", alpha, "above 0 and up to 1")
        what = f"`reference` of `LearningRateAnnealing` is `{reference!r}`"
        if isinstance(reference, bool) or not isinstance(reference, int | np.integer):
            raise TypeError(f"{what}, not a whole number. Give the index of a term.")
        if reference < 0:
            raise ValueError(f"{what}. Terms are counted from 0: give at least that.")
        self.reference = int(reference)
        self.every = positive_int(every, "`every` of `LearningRateAnnealing`")

    def check(self, num: int) -> None:
        """Raise ValueError unless there is a term of index `reference`."""
        if self.reference >= num:
            raise ValueError(
                f"`reference` of `LearningRateAnnealing` is `{self.reference}`, but "
                f"there are {num} terms, counted from 0. Give a smaller index."
            )

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Move toward the ratios of equation 40; see `AbstractRule.renew`."""
        del key
        means = [_norm(g, 1) / optax.tree.size(g) for g in seen.gradients]
        ratios = _norm(seen.gradients[self.reference], jnp.inf) / jnp.stack(means)
        weights = approach(memory["weights"], ratios, self.alpha)
        return {"weights": weights.at[self.reference].set(1)}


@final
class GradientBalance(AbstractRule):
    """Scale losses so that the norms of their gradients are equal.

    A term's weight moves toward the sum of all norms over the norm of its own gradient.
    Weights start at 1 and have no upper bound. A term of gradient 0 keeps its weight.

    Attributes:
        alpha: The share kept of the old weight, at least 0 and below 1.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` is out of range.

    Example:
        >>> rule = GradientBalance(alpha=0.5)
        >>> gradients = jnp.array([3.0, 4.0]), jnp.array([0.0, 20.0])
        >>> seen = Seen(jnp.array([1.0, 1.0]), gradients)
        >>> rule.renew(rule.init(2), seen, key=jax.random.key(0))["weights"].tolist()
        [3.0, 1.125]

    Source:
        Wang, Sankaran, Wang and Perdikaris, "An Expert's Guide to Training
        Physics-informed Neural Networks", 2023, arXiv:2308.08468, equations 2.12-2.15.
    """

    alpha: float
    every: int
    needs: ClassVar[Needs] = "gradients"

    def __init__(self, alpha: float = 0.9, every: int = 1_000):
        self.alpha = number(self, "alpha", alpha, "at least 0 and below 1")
        self.every = positive_int(every, "`every` of `GradientBalance`")

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Move toward the ratios of equation 2.12; see `AbstractRule.renew`."""
        del key
        norms = jnp.stack([_norm(g) for g in seen.gradients])
        ratios = jnp.sum(norms) / norms
        return {"weights": approach(memory["weights"], ratios, 1 - self.alpha)}


@final
class Uncertainty(AbstractRule):
    """Learn the noise of each term, and weigh the term by its inverse.

    The sum is that of `0.5 * exp(-s) * loss + 0.5 * s` over the terms, where each `s`,
    the log of a variance, is learned by an optimizer of the rule's own: from the next
    step on, as if it were trained with the model. It starts at 0, with a weight of 0.5,
    and is kept from -30 to 30: a loss of 0 takes it to -30.

    Attributes:
        optimizer: An `optax.GradientTransformation`; by default `optax.adam(0.025)`.

    Raises:
        TypeError: `optimizer` is something else.

    Example:
        >>> rule = Uncertainty(optax.sgd(0.1))
        >>> seen = Seen(jnp.array([1.0, 3.0]))
        >>> memory = rule.renew(rule.init(2), seen, key=jax.random.key(0))
        >>> [round(w, 3) for w in rule.weights(memory).tolist()]
        [0.5, 0.452]

    Source:
        Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses
        for Scene Geometry and Semantics", 2018, arXiv:1705.07115, equation 7, in `s` as
        at the end of section 3.2. The default optimizer is that of arXiv:1711.02257.
    """

    optimizer: optax.GradientTransformation
    every: int
    delayed: ClassVar[bool] = True

    def __init__(self, optimizer: Any = None, every: int = 1):
        optimizer = optax.adam(0.025) if optimizer is None else optimizer
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(
                f"`optimizer` of `Uncertainty` is `{optimizer!r}`, not an optimizer. "
                "Use one of Optax's, such as `optax.adam(0.025)`."
            )
        self.optimizer = optimizer
        self.every = positive_int(every, "`every` of `Uncertainty`")

    def init(self, num: int) -> PyTree:
        """Make a memory of variances of 1, and the optimizer's state for them."""
        logs = jnp.zeros(num, float)
        return {"logs": logs, "opt_state": self.optimizer.init(logs)}

    def weights(self, memory: PyTree) -> Array:
        """Read the terms' weights."""
        return 0.5 * jnp.exp(-memory["logs"])

    def offset(self, memory: PyTree) -> Array:
        """Half the sum of the logs of the variances."""
        return 0.5 * jnp.sum(memory["logs"])

    def renew(self, memory: PyTree, seen: Seen, *, key: Any) -> PyTree:
        """Follow the gradient of the sum; see `AbstractRule.renew`."""
        del key
        logs = memory["logs"]
        values = jnp.asarray(seen.values, logs.dtype)
        grad = 0.5 - 0.5 * jnp.exp(-logs) * values
        updates, state = self.optimizer.update(grad, memory["opt_state"], logs)
        logs = jnp.clip(jnp.asarray(optax.apply_updates(logs, updates)), -30, 30)
        return if_finite((grad, logs), {"logs": logs, "opt_state": state}, memory)
