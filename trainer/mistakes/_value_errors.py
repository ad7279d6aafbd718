"""Mistakes with values: there are none while a step is compiled, and arrays stay."""

import jax

from trainer.mistakes._known_errors import known


_NO_VALUES = (
    "the step, the batch and the model have no values while the step is compiled"
)
_SHAPES = "a compiled step has shapes that do not depend on values"
_ERASED = "it means nothing once the function that made it is over"
_RETURNED = (
    "Return it as a metric, `return loss, {'name': value}`, or as a scan's carry"
)
_CONDITION = jax.errors.TracerBoolConversionError
_NUMBER = jax.errors.ConcretizationTypeError


# The first that fits is the one: the special ones come before the general.
OF_VALUES = [
    known(
        _CONDITION,
        "",
        "An `assert` looks at a traced value",
        _NO_VALUES,
        "Write `x = eqx.error_if(x, wrong, 'message')`, and use what it returns",
        line=r"^assert\b",
    ),
    known(
        _CONDITION,
        "",
        "A Python `while` looks at a traced value",
        _NO_VALUES,
        "Use `jax.lax.scan`, or `jax.lax.fori_loop` with a fixed number of turns",
        line=r"^while\b",
    ),
    known(
        _CONDITION,
        "",
        "A builtin of Python's compares traced values",
        _NO_VALUES,
        "Use `jnp.maximum`, `jnp.minimum`, `jnp.any`, `jnp.all` or `jnp.sort`",
        line=r"^(?!.*\b(if|and|or|not)\b).*(?<![\w.])(max|min|any|all|sorted)\(",
    ),
    known(
        _CONDITION,
        "",
        "A Python `if`, `while`, `and`, `not` or `assert` looks at a traced value",
        _NO_VALUES,
        "Choose between losses with `tr.switch_every`, `tr.piecewise` or `tr.Switch`, "
        "and between values with `jnp.where` or `jax.lax.cond`",
    ),
    known(
        ValueError,
        r"^The truth value of an array with more than one element is ambiguous",
        "A Python `if`, `while`, `and`, `not` or `assert` looks at a whole array",
        "it has several values, and one is asked for",
        "Choose for each of them with `jnp.where`, or reduce them with `jnp.all` or "
        "`jnp.any` and choose with `jax.lax.cond`",
    ),
    known(
        jax.errors.TracerArrayConversionError,
        "",
        "A NumPy function is given a traced value",
        _NO_VALUES,
        "Use the function of the same name in `jax.numpy`",
    ),
    known(
        jax.errors.TracerIntegerConversionError,
        "",
        "A traced value is used as a Python index or in `range`",
        _NO_VALUES,
        "Index a `jnp` array, or use `jax.lax.fori_loop`",
    ),
    known(
        jax.errors.NonConcreteBooleanIndexError,
        "",
        "An array is indexed by a traced mask, which has no fixed number of rows",
        _NO_VALUES,
        "Keep the shape and use `jnp.where(mask, x, 0)`",
    ),
    known(
        _NUMBER,
        r"size argument|jnp\.unique|total number of repeats",
        "How many rows a result has depends on a traced value",
        _SHAPES,
        "Give the number, as in `jnp.nonzero(x, size=10)`, or keep all rows and use "
        "`jnp.where(mask, x, 0)`",
    ),
    known(
        _NUMBER,
        r"argument of jnp\.|jnp\.\w+ argument",
        "A traced value is used as a length",
        _SHAPES,
        "Take a fixed length and leave out the rest: "
        "`jnp.where(jnp.arange(10) < n, x, 0)`",
    ),
    known(
        _NUMBER,
        "",
        "A traced value is turned into a Python number",
        _NO_VALUES,
        "Keep it an array, and report it as a metric: `return loss, {'name': value}`",
    ),
    known(
        jax.errors.UnexpectedTracerError,
        "",
        "A traced value is used that was kept in a list, an attribute or a global",
        _ERASED,
        _RETURNED,
    ),
    known(
        Exception,
        "^Leaked ",
        "A traced value is kept in a list, an attribute or a global",
        _ERASED,
        _RETURNED,
    ),
    known(
        IndexError,
        r"^Slice entries must be static|must have static start/stop/step",
        "A slice has a traced bound",
        _SHAPES,
        "Write `jax.lax.dynamic_slice_in_dim(x, start, size)` for a fixed size, or "
        "`jnp.where(jnp.arange(len(x)) < stop, x, 0)`",
    ),
    known(
        TypeError,
        r"^Shapes must be 1D sequences of concrete values.*Tracer",
        "A traced value is used in a shape",
        _SHAPES,
        "Take the length from another shape, such as `x.shape[0]`, or a Python number",
    ),
    known(
        TypeError,
        r"^unsupported format string passed to \w*Tracer\.|"
        r"^%\w format: .* is required, not \w*Tracer$",
        "A traced value is formatted as a number",
        _NO_VALUES,
        "Print it while the step runs, `jax.debug.print('{x:.3f}', x=value)`, or "
        "report it as a metric",
    ),
    known(
        TypeError,
        r"unhashable type: '\w*Tracer'",
        "A traced value is hashed, as a key of a dict or a member of a set",
        _NO_VALUES,
        "Index a `jnp` array with it, or choose with `jax.lax.switch`",
    ),
    known(
        TypeError,
        r"^JAX arrays are immutable",
        "A JAX array is changed in place",
        "it never changes",
        "Write `x = x.at[0].set(value)`, or `.add(value)`, and use the new array",
    ),
    known(
        ValueError,
        r"^(?:output array|assignment destination) is read-only$",
        "A view of a JAX array is changed in place",
        "the array never changes",
        "Make a new one, `x = x + 1`, or copy it first: `np.array(x)`",
    ),
    *(
        known(
            kind,
            r"[Aa]rray has been deleted|[Bb]uffer has been deleted or donated",
            "An array is used whose memory was given away",
            "a function with `donate_argnums` took it, or it was deleted",
            "Use what that function returned, or a copy made before: `jnp.copy(x)`",
        )
        for kind in (RuntimeError, ValueError, jax.errors.JaxRuntimeError)
    ),
]
