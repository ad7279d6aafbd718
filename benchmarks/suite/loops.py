"""Every loop that is timed: its name, what a reader sees, and how it is made."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .works import WORKS


OURS, LIMITS, HAND, PEERS = "this package", "limits", "by hand", "other packages"


@dataclass(frozen=True)
class Loop:
    """A loop, and where it comes from.

    Attributes:
        label: What a reader sees.
        group: One of the four above.
        maker: Module and function that make it.
        options: What the function is given besides the work.
        needs: Packages that it imports and this package does not.
        family: For a limit, what it is the limit of.
    """

    label: str
    group: str
    maker: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    family: str = ""

    def missing(self) -> str:
        """The first package that is not installed, or nothing."""
        absent = (n for n in self.needs if importlib.util.find_spec(n) is None)
        return next(absent, "")

    def make(self, work: str) -> Callable[[int], int]:
        module, name = self.maker.split(":")
        found = importlib.import_module(f".{module}", __package__)
        return getattr(found, name)(WORKS[work], **self.options)


def _ours(label: str, **options: Any) -> Loop:
    return Loop(f"fit, {label}", OURS, "ours:make", options)


def _limit(label: str, family: str, kind: str, switched: bool, **options: Any) -> Loop:
    options = {"kind": kind, "switched": switched, **options}
    losses = "two losses" if switched else "one loss"
    return Loop(f"{label}, {losses}", LIMITS, "limits:make", options, family=family)


# What is called how, what it is the limit of, which kind it is, and its options.
_LIMITS = {
    "loop": ("100 steps in a loop, batches on the device", "steps", "resident loop"),
    "call": ("a call a step, batches on the device", "steps", "resident call"),
    "gather": ("100 steps, each gathers its rows", "arrays", "gather each"),
    "gather-first": ("100 steps, rows gathered before", "arrays", "gather first"),
    "gather-call": ("a call a step, rows gathered in it", "arrays", "gather call"),
    "stack": ("100 batches stacked a call", "batches", "stacked"),
    "stack-10": ("10 batches stacked a call", "batches", "stacked", 10),
    "host-call": ("a call a step, a NumPy batch each", "batches", "host call"),
}


def _make_limits() -> dict[str, Loop]:
    found = {}
    for name, (label, family, kind, *chunk) in _LIMITS.items():
        more = {"chunk": chunk[0]} if chunk else {}
        for switched in (False, True):
            key = f"limit-{name}-two" if switched else f"limit-{name}"
            found[key] = _limit(label, family, kind, switched, **more)
    return found


def _peer(label: str, maker: str, needs: str, **options: Any) -> Loop:
    return Loop(label, PEERS, maker, options, tuple(needs.split()))


LOOPS: dict[str, Loop] = {
    "fit-arrays": _ours("tr.Arrays", data="arrays"),
    "fit-arrays-1": _ours("tr.Arrays, 1 step a call", data="arrays", steps_per_call=1),
    "fit-arrays-100": _ours(
        "tr.Arrays, 100 steps a call", data="arrays", steps_per_call=100
    ),
    "fit-batches": _ours("NumPy batches", data="batches"),
    "fit-batches-1": _ours(
        "NumPy batches, 1 step a call", data="batches", steps_per_call=1
    ),
    "fit-batches-100": _ours(
        "NumPy batches, 100 steps a call", data="batches", steps_per_call=100
    ),
    "fit-jdl": _ours("jax-dataloader", data="jdl"),
    "jdl": Loop("jax-dataloader alone, no training", OURS, "ours:make_iteration"),
    **_make_limits(),
    "hand": Loop("eqx.filter_jit loop", HAND, "by_hand:make", {"reported": False}),
    "hand-tqdm": Loop(
        "eqx.filter_jit loop, tqdm and float(loss)",
        HAND,
        "by_hand:make",
        {"reported": True},
    ),
    "keras": _peer("Keras", "peers_jax:make_keras", "keras", steps_per_execution=1),
    "keras-32": _peer(
        "Keras, steps_per_execution=32",
        "peers_jax:make_keras",
        "keras",
        steps_per_execution=32,
    ),
    "klax": _peer("klax", "peers_jax:make_klax", "klax", logger=True),
    "klax-silent": _peer(
        "klax, no logger", "peers_jax:make_klax", "klax", logger=False
    ),
    "flowjax": _peer("flowjax", "peers_jax:make_flowjax", "flowjax"),
    "nnx": _peer("Flax nnx.jit loop", "peers_jax:make_nnx", "flax", how="jit"),
    "nnx-cached": _peer(
        "Flax nnx.cached_partial loop",
        "peers_jax:make_nnx",
        "flax",
        how="cached_partial",
    ),
    "nnx-partial": _peer(
        "Flax nnx.jit_partial loop", "peers_jax:make_nnx", "flax", how="jit_partial"
    ),
    "torch": _peer("PyTorch loop", "peers_torch:make_plain", "torch"),
    "lightning": _peer(
        "Lightning",
        "peers_torch:make_lightning",
        "torch lightning",
        whole_batches=False,
    ),
    "lightning-bare": _peer(
        "Lightning, barebones, whole batches",
        "peers_torch:make_lightning",
        "torch lightning",
        whole_batches=True,
    ),
}
