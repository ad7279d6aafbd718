"""Losses added up, with weights that a rule finds while training."""

from typing import Any, final

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from trainer._composed import AbstractComposed, Evaluation, named_losses
from trainer._losses import Given, Output
from trainer._mean_square import MeanSquare
from trainer._memory import (
    check_arrays,
    own_of,
    part_of,
    renewed,
    Salt,
    same_form,
    unsalted,
)
from trainer._metrics import Metric, switch
from trainer._rules import AbstractRule, Seen
from trainer._tree import describe
from trainer._weighted_sum import check_terms, scaled, Sum, term_branches, term_metrics


@final
class AdaptiveSum(AbstractComposed):
    """Add losses up, with weights that a rule renews while training.

    Every so many steps, as the rule says, it looks at the losses, at the gradient of
    each, or at their neural tangent kernels. That costs one more forward pass or one
    more gradient a term, in those steps alone. What the rule remembers is a part of the
    training state.

    Reports each term's unweighted value under its name, its metrics under `name/`, and
    every weight as `weight/name`.

    Attributes:
        rule: Finds the weights, such as `tr.GradNorm()`.
        names: Names of the terms.
        losses: The losses.

    Raises:
        TypeError: `rule` is not a rule, or a term is not a loss. `tr.NTKTrace` takes
            `tr.MeanSquare`s alone.
        ValueError: There is no term.

    Example:
        >>> from trainer import SoftAdapt
        >>> def near(model, batch): return jnp.abs(model)
        >>> def far(model, batch): return model**2
        >>> loss = AdaptiveSum(SoftAdapt(every=10), near=near, far=far)
        >>> loss.names
        ('near', 'far')
    """

    rule: AbstractRule
    names: tuple[str, ...]
    losses: tuple[Any, ...]

    def __init__(self, rule: AbstractRule, /, **terms: Any):
        if not isinstance(rule, AbstractRule):
            raise TypeError(
                f"`{describe(rule)}` is not a rule. Use one such as `tr.GradNorm()`, "
                "or a subclass of `tr.AbstractRule`."
            )
        check_terms(terms, "AdaptiveSum")
        for name, loss in terms.items():
            if isinstance(loss, tuple):
                raise TypeError(
                    f"Term `{name}` of `AdaptiveSum` is a tuple. The rule finds the "
                    "weights; give the loss alone."
                )
            if rule.needs == "traces" and not isinstance(loss, MeanSquare):
                raise TypeError(
                    f"`{type(rule).__name__}` looks at the residuals of a loss, which "
                    f"`{name}` does not show. Write `tr.MeanSquare(residuals)`."
                )
        self.rule = rule
        self.names, self.losses = named_losses(terms, "AdaptiveSum")
        rule.check(len(self.losses))

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches of every Switch among the terms."""
        return term_branches(self)

    def own_memory(self) -> PyTree:
        """What the rule remembers, and the weights of the last step."""
        memory = check_arrays(self.rule.init(len(self.names)), self.rule)
        return self._used(memory, memory, unsalted())

    def _used(self, memory: PyTree, seen: PyTree, salt: Salt) -> dict[str, Any]:
        """A memory, and the weights that follow from the one to be seen."""
        weights, offset = self.rule.weights(seen), self.rule.offset(seen)
        return {"rule": memory, "weights": weights, "offset": offset, "salt": salt}

    def combine(self, evaluate: Evaluation, given: Given) -> Output:
        """Renew the weights if that is due, and evaluate the sum."""
        own = own_of(given.memory)
        own = self.own_memory() if own is None else own
        if evaluate.trains:
            new = self._renewed(own, evaluate, given)
            seen = own["rule"] if self.rule.delayed else new
            own = self._used(new, seen, own["salt"])
        found = self._sum(own["weights"], evaluate, given)
        # The loss comes first in a value; a gradient does not see the offset.
        leaves, treedef = jtu.tree_flatten(found.value)
        leaves[0] = leaves[0] + own["offset"].astype(leaves[0].dtype)
        value = jtu.tree_unflatten(treedef, leaves)
        weights = {
            f"weight/{name}": Metric(own["weights"][place])
            for place, name in enumerate(self.names)
        }
        memory = renewed(found.memory, own, {})
        return Output(value, {**found.metrics, **weights}, found.state, memory)

    def _renewed(self, own: PyTree, evaluate: Evaluation, given: Given) -> PyTree:
        """The rule's memory, renewed where that is due."""
        memory = own["rule"]
        key = None if given.key is None else jr.fold_in(given.key, own["salt"].number)

        def renew(memory: PyTree) -> Any:
            new = self.rule.renew(memory, self._seen(evaluate, given), key=key)
            return same_form(memory, new, self.rule, "renew"), {}

        # At every step it stands outside of a cond, so that XLA shares what it computes
        # with the sum.
        if self.rule.every == 1:
            return renew(memory)[0]
        due = (given.step % self.rule.every == 0).astype(jnp.int32)
        memory, _ = switch(due, [lambda memory: (memory, {}), renew], memory)
        return memory

    def _seen(self, evaluate: Evaluation, given: Given) -> Seen:
        """What the rule needs to see, of what this step runs.

        The model's state and what the terms remember are left as they are.
        """
        values, gradients, traces = [], [], []
        for name, loss in self.parts().items():
            part = given._replace(memory=part_of(given.memory, name))
            if self.rule.needs == "gradients":
                value, gradient = evaluate(loss, part).value
                gradients.append(gradient)
            else:
                value = evaluate.without_gradient()(loss, part).value
            values.append(value)
            if self.rule.needs == "traces" and evaluate.trace is not None:
                traces.append(evaluate.trace(loss, part))
        return Seen(
            jnp.stack([jnp.asarray(v, float) for v in values]),
            tuple(gradients) or None,
            jnp.stack(traces) if traces else None,
        )

    def _sum(self, weights: Array, evaluate: Evaluation, given: Given) -> Output:
        """The weighted sum, with what the terms report and remember."""
        plain = not any(isinstance(loss, AbstractComposed) for loss in self.losses)
        if plain:
            each = tuple(weights[place] for place in range(len(self.names)))
            found = evaluate(Sum(self.names, self.losses, each), given)
            return found._replace(memory=given.memory)
        total, metrics, memories = None, {}, {}
        for place, (name, loss) in enumerate(self.parts().items()):
            part = given._replace(memory=part_of(given.memory, name))
            value, inner, state, memories[name] = evaluate(loss, part)
            given = given._replace(state=state)
            metrics |= term_metrics(name, jtu.tree_leaves(value)[0], inner)
            term = scaled(value, weights[place])
            total = term if total is None else jax.tree.map(jnp.add, total, term)
        memory = renewed(given.memory, own_of(given.memory), memories)
        return Output(total, metrics, given.state, memory)
