"""What a program remembers between steps, as a tree that mirrors the program."""

import zlib
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._selectors import Report
from trainer._tree import describe
from trainer._types import Step
from trainer.recompiles._differences import first_difference


@final
class Node(eqx.Module):
    """What one composed loss or update remembers.

    Attributes:
        own: Its own memory: of its selector or its rule.
        parts: Memories of its parts, by name; those that have none are left out.
    """

    own: PyTree
    parts: dict[str, PyTree]


def node(own: PyTree, parts: dict[str, PyTree]) -> Node | None:
    """A node, or None if there is nothing to remember."""
    kept = {name: memory for name, memory in parts.items() if memory is not None}
    return None if own is None and not kept else Node(own, kept)


def own_of(memory: Node | None) -> PyTree:
    """A node's own memory."""
    return None if memory is None else memory.own


def part_of(memory: Node | None, name: str) -> PyTree:
    """The memory of the part called `name`."""
    return None if memory is None else memory.parts.get(name)


def renewed(memory: Node | None, own: PyTree, parts: dict[str, PyTree]) -> Node | None:
    """A node with new memories in it, where it had one."""
    if memory is None:
        return None
    kept = {name: parts.get(name, old) for name, old in memory.parts.items()}
    return Node(own, kept)


@final
class Salt(eqx.Module):
    """A number that one who draws by chance folds into the step's key.

    There is one key a step; with a number of its own each draws apart from the others.
    """

    number: Any


def unsalted() -> Salt:
    """A number that `salted` is to replace."""
    return Salt(jnp.uint32(0))


def salted(memory: PyTree) -> PyTree:
    """Give each that draws by chance a number from its place in the memory."""
    is_salt = lambda node: isinstance(node, Salt)

    def one(path: Any, node: Any) -> Any:
        if not is_salt(node):
            return node
        return Salt(jnp.uint32(zlib.crc32(jtu.keystr(path).encode())))

    return jtu.tree_map_with_path(one, memory, is_leaf=is_salt)


def check_arrays(memory: PyTree, owner: Any) -> PyTree:
    """Raise TypeError unless a memory is made of arrays; return it."""
    for leaf in jtu.tree_leaves(memory):
        if not eqx.is_array(leaf):
            raise TypeError(
                f"The memory of `{type(owner).__name__}` holds `{describe(leaf)}`, "
                "which a compiled step cannot change. Make it of arrays, such as "
                "`jnp.int32(0)`."
            )
    return memory


def same_form(old: PyTree, new: PyTree, owner: Any, method: str) -> PyTree:
    """Raise TypeError unless a method keeps a memory's form; return the new one."""
    difference = first_difference("memory", old, new)
    if difference:
        raise TypeError(
            f"`{type(owner).__name__}.{method}` changes the form of its memory: "
            f"{difference}. It keeps the structure, shapes and dtypes that `init` made."
        )
    return new


@final
class Memory(eqx.Module):
    """Everything a run remembers beside the model and its optimizers.

    Attributes:
        program: What selectors, adaptive weights and loss scales remember, as a tree
            that mirrors the program.
        reports: What callbacks measured last, by name, as far as a selector watches it.
        num_steps: The run's total, if a schedule is given in fractions of it.
        halted: Whether the run stands still because a step was not finite.
        keys: The members' own random keys, on a leading axis, in an ensemble that was
            given seeds.
    """

    program: PyTree = None
    reports: dict[str, Report] = eqx.field(default_factory=dict)
    num_steps: Step | None = None
    halted: Any = None
    keys: Any = None
