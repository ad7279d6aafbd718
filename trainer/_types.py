"""Type names shared by every module, and the error of a second compile."""

import jax
from jaxtyping import Array, Int32, PyTree


Batch = PyTree
Model = PyTree
Step = Int32[Array, ""]
Key = jax.Array


class RecompileError(RuntimeError):
    """The compiled step would have to be compiled a second time.

    Raised before anything is run or lost, when a batch, a state or an attribute of the
    Trainer no longer fits the step that was compiled. The message names the leaf's
    path, what it was and what it is now.
    """
