"""One measurement of growth.py, in a process of its own; prints JSON."""

import json
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from growth import arrays, huber, mse, tiny

import trainer as tr


def peak(kind: str) -> dict[str, float]:
    """Peak memory of some steps of Adam on 200 MB of parameters, in this process."""
    make = lambda: jax.device_put(
        np.random.default_rng(0).random((5000, 5000), np.float32) * 1e-2
    )
    model, x, y = [make(), make()], np.ones((8, 5000), np.float32), np.zeros(5000)
    batch, adam = (x, y.astype(np.float32)), optax.adam(1e-4)
    loss = lambda m, b: jnp.mean((jnp.tanh(b[0] @ m[0]) @ m[1] - b[1]) ** 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if kind == "fit":
        trainer = tr.Trainer(tr.switch_every(2, loss, loss), adam)
        trainer.fit(model, [batch], num_steps=6, progress=False)
    else:

        def one(model: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(model, batch)
            updates, state = adam.update(grads, state)
            return optax.apply_updates(model, updates), state, value

        # Its caller keeps the model, as with `fit`.
        now = [jnp.copy(leaf) for leaf in model]
        state, flat = adam.init(now), jax.jit(one, donate_argnums=(0, 1))
        for _ in range(6):
            now, state, _ = flat(now, state, batch)
        jax.block_until_ready(now)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"MB before": before, "peak MB": most}


def started(folder: str) -> dict[str, float]:
    """From the imports to the end of the first step, in this process."""
    cache = None if folder == "none" else folder
    began = time.perf_counter()
    loss = tr.switch_every(100, mse, huber)
    trainer = tr.Trainer(loss, optax.adam(1e-3), compile_cache=cache)
    result = trainer.fit(tiny(), arrays(), num_steps=1, progress=False)
    whole = time.perf_counter() - began
    return {"to the first step s": whole, "of which compile s": result.compile_seconds}


if __name__ == "__main__":
    print(json.dumps({"peak": peak, "started": started}[sys.argv[1]](sys.argv[2])))
