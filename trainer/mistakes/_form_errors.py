"""Mistakes with forms: branches that differ, and what a gradient cannot be taken of."""

from trainer.mistakes._known_errors import known


_ONE_FORM = "a compiled step has one form of each value"
_OPTIMIZER = "Write `opt.init(eqx.filter(model, eqx.is_inexact_array))`"


OF_FORMS = [
    known(
        TypeError,
        r"^Gradient only defined for scalar-output .* Output had shape: (.*?\))",
        r"A gradient is taken of an array of shape \1",
        "a gradient is that of one number",
        "Reduce it, for example with `jnp.mean`",
    ),
    known(
        TypeError,
        r"^Gradient only defined for scalar-output functions\. Output was (.*)\.",
        r"A gradient is taken of `\1`",
        "a gradient is that of one number",
        "Return one; for a function that returns `(loss, metrics)`, write "
        "`has_aux=True`",
    ),
    known(
        TypeError,
        r"^grad requires real-valued outputs .* but got (\w+)",
        r"A gradient is taken of a number of dtype \1",
        "a loss is a real floating number",
        "Compute it from floating arrays; of a complex number take `jnp.real`",
    ),
    known(
        TypeError,
        r"^grad requires real- or complex-valued inputs .* but got (\w+)",
        r"`jax.grad` is given a tree with an array of dtype \1",
        "there are gradients by floating arrays alone",
        "Write `eqx.filter_grad` and `eqx.apply_updates`, which leave the rest out",
    ),
    known(
        TypeError,
        r"^(?:Argument|Cannot interpret value|Error interpreting argument)\b[\s\S]*?"
        r"of type '?<class '(?:[\w.]*\.)?(\w+)'",
        r"A function of JAX's is given a `\1`, which is no array",
        "it takes trees of arrays alone",
        "For a model use Equinox's of the same name, such as `eqx.filter_grad`, "
        "`eqx.filter_vmap` or `eqx.filter_jit`",
    ),
    known(
        TypeError,
        r"^(?:zeros|ones|full)_like requires ndarray or scalar arguments, "
        r"got <class '.*(?:custom_jvp|custom_vjp|[fF]unction|method)",
        "`init` of an optimizer is given a model with a function among its leaves",
        "it keeps something for each leaf, and takes arrays alone",
        _OPTIMIZER,
        line=r"\binit\w*\(|^$",
    ),
    known(
        ValueError,
        r"^pytree structure error: different types at key path\s+"
        r"tree_map tree\.?(\S*)[\s\S]*<class 'NoneType'>[\s\S]*Tracer",
        r"The optimizer's state has something for `\1`, for which there is no gradient",
        "it was made for more than the floating arrays",
        _OPTIMIZER,
    ),
    known(
        TypeError,
        r"^(cond|switch) branches must have equal output types"
        r"[\s\S]*?\b(output of .*? do not match)",
        r"The branches of a `jax.lax.\1` return different types",
        rf"{_ONE_FORM}, and the \2",
        "Return one shape and dtype from all, as with `jnp.float32(0)` for `0`",
    ),
    known(
        TypeError,
        r"^(cond|switch) branch outputs must have the same pytree structure.*"
        r"[\s\S]*?\n[ *]*(.* output .*?), so",
        r"The branches of a `jax.lax.\1` return different structures",
        rf"{_ONE_FORM}, and \2",
        "Return the same from all: as many values, and the same keys",
    ),
    known(
        TypeError,
        r"^(scan|while_loop|fori_loop) body function carry input and carry output must"
        r"[\s\S]*?[Tt]he (input carry .*?), so",
        r"The carry of a `jax.lax.\1` changes its form",
        rf"{_ONE_FORM}, and the \2",
        "Start with the form it is to have, as with `jnp.float32(0)` for `0`",
    ),
    known(
        ValueError,
        r"^Reverse-mode differentiation does not work for lax\.while_loop",
        "A loss has a loop whose number of turns is not fixed",
        "its gradient goes back through every turn",
        "Use `jax.lax.scan`, or `jax.lax.fori_loop` with Python numbers as its bounds",
    ),
]
