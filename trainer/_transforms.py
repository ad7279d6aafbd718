"""Transforms: what is done to the model in the compiled step, after the update."""

import abc
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._counts import is_number, positive_int
from trainer._tree import describe, is_eager, path_name, struct
from trainer._types import Model, Step
from trainer._where import check_picks, check_where, marked, owned, shared_leaf, Where
from trainer.mistakes._trace_errors import explain_trace
from trainer.recompiles._differences import first_difference


class AbstractTransform(eqx.Module):
    """Runs in the compiled step, after the update: it may change the model.

    What it remembers is a PyTree of arrays, `kept`. Subclass it for a transform of your
    own: `__call__` is traced, so it uses `jax.lax.cond` and no Python `if` on the step.
    """

    @abc.abstractmethod
    def init(self, model: Model) -> PyTree:
        """Make the `kept` that the first step sees: arrays of its own, or None."""

    @abc.abstractmethod
    def __call__(
        self, model: Model, kept: PyTree, *, step: Step
    ) -> tuple[Model, PyTree]:
        """Transform the model once.

        Args:
            model: The model that the update returned.
            kept: What the step before kept.
            step: Completed updates, this one included: 1 after the first. A traced
                int32 scalar.

        Returns:
            The model, and what is kept for the next step. Both have the structure,
            shapes and dtypes that they came with.
        """

    def check(self, model: Model, owned: PyTree) -> None:
        """Raise ValueError if it does not go with what optimizers own of the model."""
        del model, owned

    def evaluated(self, model: Model, kept: PyTree) -> Model:
        """The model to evaluate in the place of `model`; by default `model` itself."""
        del kept
        return model


@final
class Target(AbstractTransform):
    """Let a target network follow the online one, by copies or by small steps.

    Both are parts of the model. With `every`, all arrays are copied after each N-th
    update, whatever the losses and optimizers do at that step. With `tau`, the target's
    inexact arrays become `tau * online + (1 - tau) * target`: after each update, or
    after each N-th if `every` is given too. A target in less than float32 is rounded
    each time, and may not follow a small `tau` at all.

    Attributes:
        online: Picks the sub-tree that is followed, as in `eqx.tree_at`.
        target: Picks the sub-tree that follows. No optimizer should own it.
        every: Completed updates from one copy (or mix) to the next.
        tau: Share of the online network in the mix, above 0 and up to 1.

    Raises:
        TypeError: Neither `every` nor `tau` is given, or one is of the wrong kind.
        ValueError: One is out of range; or, in `init`, the sub-trees are the same, hold
            nothing to copy, or differ in structure, shapes or dtypes.

    Example:
        >>> follow = Target(lambda m: m["q"], lambda m: m["target"], every=10)
        >>> model = {"q": jnp.float32(3.0), "target": jnp.float32(1.0)}
        >>> [float(follow(model, None, step=s)[0]["target"]) for s in (9, 10)]
        [1.0, 3.0]

    Source:
        Copies: Mnih et al., "Human-level control through deep reinforcement learning",
        Nature 518, 2015. `tau`: Lillicrap et al., "Continuous control with deep
        reinforcement learning", 2015, arXiv:1509.02971.
    """

    online: Where
    target: Where
    every: int | None
    tau: float | None

    def __init__(
        self,
        online: Where,
        target: Where,
        *,
        every: int | None = None,
        tau: float | None = None,
    ):
        if every is None and tau is None:
            raise TypeError(
                "`Target` was given neither `every` nor `tau`, so it would never "
                "change. Write `every=1_000` for copies, or `tau=0.005` for mixing."
            )
        self.online = check_picks(online, "`online` of `Target`")
        self.target = check_picks(target, "`target` of `Target`")
        self.every = self.tau = None
        if every is not None:
            self.every = positive_int(every, "`every` of `Target`")
        if tau is not None:
            self.tau = check_number(tau, "`tau` of `Target`", "`0.005`")
        if self.tau is not None and not 0 < self.tau <= 1:
            raise ValueError(
                f"`tau` of `Target` is `{tau!r}`; it must be above 0 and at most 1, "
                "because it is the share of the online network in the mix."
            )

    def init(self, model: Model) -> None:
        """Keep nothing; check that the two sub-trees are alike."""
        leaves = lambda where: jtu.tree_leaves(marked(model, where, "Target"))
        if leaves(self.online) == leaves(self.target):
            raise ValueError(
                "`online` and `target` of `Target` pick the same leaves, so nothing "
                "would follow. Pick two parts of the model."
            )
        online = eqx.filter(self.online(model), eqx.is_array)
        target = eqx.filter(self.target(model), eqx.is_array)
        difference = first_difference("target", online, target)
        if difference:
            raise ValueError(
                f"The sub-trees of `Target` differ: from online to target, {difference}"
                ". Make the target a copy of the online network."
            )
        if not jtu.tree_leaves(eqx.filter(online, _that_follow(self.tau))):
            what = "array to copy" if self.tau is None else "inexact array to mix"
            raise ValueError(
                f"What `online` of `Target` picks has no {what}. Pick a part of the "
                "model that has one."
            )

    def check(self, model: Model, owned: PyTree) -> None:
        """Raise ValueError if an optimizer would train the target as well."""
        leaf = shared_leaf(marked(model, self.target, "Target"), owned)
        if leaf is not None:
            raise ValueError(
                f"`{leaf}` belongs to the target of `Target`, and an optimizer owns it "
                "as well: gradients, decay and momentum would move it. Give the update "
                "`where=`, as in `tr.Minimize(loss, optimizer, where=lambda m: m.q)`."
            )

    def __call__(self, model: Model, kept: None, *, step: Step) -> tuple[Model, None]:
        """Copy or mix if it is due; see `AbstractTransform.__call__`."""
        tau, kind = self.tau, _that_follow(self.tau)
        online = eqx.filter(self.online(model), kind)
        target, rest = eqx.partition(self.target(model), kind)
        due = is_due(step, self.every or 1)
        follow = lambda old, new: new if tau is None else mix(old, new, tau)
        target = if_due(due, follow, target, online)
        return eqx.tree_at(self.target, model, eqx.combine(target, rest)), kept


def _that_follow(tau: float | None) -> Callable[[Any], bool]:
    return eqx.is_array if tau is None else eqx.is_inexact_array


@final
class Project(AbstractTransform):
    """Put every parameter back into an allowed set after each update.

    The function is applied to one inexact array at a time.

    Attributes:
        fn: From an array to one of the same shape and dtype.
        where: Picks what is projected, as in `eqx.tree_at`; by default the whole model.

    Raises:
        TypeError: `fn` or `where` is not a function.
        ValueError: In `init`: `fn` changes a shape or dtype, or `where` picks no
            inexact array.

    Example:
        >>> clip = lambda w: jnp.clip(w, -0.01, 0.01)
        >>> project = Project(clip, where=lambda m: m["critic"])
        >>> model = {"critic": jnp.float32(2.0), "generator": jnp.float32(2.0)}
        >>> model, _ = project(model, project.init(model), step=1)
        >>> round(float(model["critic"]), 4), float(model["generator"])
        (0.01, 2.0)

    Source:
        Clipping a critic: Arjovsky, Chintala and Bottou, "Wasserstein GAN", 2017,
        arXiv:1701.07875, Algorithm 1.
    """

    fn: Callable[[jax.Array], Any]
    where: Where | None

    def __init__(self, fn: Callable[[jax.Array], Any], where: Where | None = None):
        if not callable(fn):
            raise TypeError(
                f"`fn` of `Project` is `{describe(fn)}`. Give a function from an array "
                "to an array, such as `lambda w: jnp.clip(w, -0.01, 0.01)`."
            )
        self.fn = fn
        self.where = check_where(where, "Project")

    def init(self, model: Model) -> None:
        """Keep nothing; check that shapes and dtypes stay as they are."""
        params, _ = picked(model, self.where, "Project")
        for path, leaf in jtu.tree_leaves_with_path(params):
            if is_eager(leaf):
                found = self.fn(leaf)
            else:
                with explain_trace():
                    found = jax.eval_shape(self.fn, struct(leaf))
            difference = first_difference(path_name("model", path), leaf, found)
            if difference:
                raise ValueError(
                    f"`fn` of `Project` must keep shapes and dtypes, but {difference}. "
                    "It is given one array at a time, and returns one like it."
                )

    def __call__(self, model: Model, kept: None, *, step: Step) -> tuple[Model, None]:
        """Apply the function; see `AbstractTransform.__call__`."""
        del step
        params, rest = picked(model, self.where, "Project")
        project = lambda leaf: jnp.asarray(self.fn(leaf), leaf.dtype)
        return eqx.combine(jtu.tree_map(project, params), rest), kept


def picked(model: Model, where: Where | None, owner: str) -> tuple[PyTree, PyTree]:
    """Split the model into the inexact arrays that `where` picks, and the rest."""
    return eqx.partition(model, owned(model, where, owner))


def is_due(step: Any, every: int) -> Any:
    return True if every == 1 else step % every == 0


def if_due(due: Any, do: Callable[..., Any], old: PyTree, new: PyTree) -> PyTree:
    """Give `do(old, new)` where it is due, and else `old`."""
    if due is True:
        return do(old, new)
    return jax.lax.cond(due, do, lambda old, _: old, old, new)


def wide(dtype: Any) -> Any:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def mix(old: PyTree, new: PyTree, share: Any) -> PyTree:
    """Move each leaf of `old` towards `new` by a share of the way, from 0 to 1.

    It arrives exactly with a share of 1, and does not drift where it has arrived:
    with `(1 - share) * old + share * new`, the two weights do not add up to 1.
    """

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        dtype = wide(old.dtype)
        a, b = old.astype(dtype), new.astype(dtype)
        s = jnp.asarray(share, jnp.finfo(dtype).dtype)
        mixed = jnp.where(s < 0.5, a + s * (b - a), b - (1 - s) * (b - a))
        # Infinities too, as in the mask of an attention, stay as they are.
        return jnp.where(a == b, b, mixed).astype(old.dtype)

    return jtu.tree_map(one, old, new)


def check_number(value: Any, what: str, example: str) -> float:
    if not is_number(value):
        raise TypeError(f"{what} is `{value!r}`. Give a number, such as {example}.")
    return float(value)
