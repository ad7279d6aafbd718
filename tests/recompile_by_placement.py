"""Second compiles by where arrays are. They need four devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from recompiles import again, once, target


def mesh_of(*names, sizes=(4,)):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def spread(x, *spec, mesh=None):
    return jax.device_put(x, NamedSharding(mesh or mesh_of("data"), P(*spec)))


X = np.ones((4, 4), np.float32)


def two(run, one, other):
    step = target(lambda x: jnp.sum(x))
    run(step, one)
    run(step, other)


CPU = "committed to cpu:0"


@again([("x", "uncommitted", CPU)])
def one_that_is_put_where_it_is(run):
    two(run, jnp.asarray(X), jax.device_put(X, jax.devices()[0]))


@again([("batch", "uncommitted", CPU)], [("w", "uncommitted", CPU)])
def a_batch_that_is_put_where_the_state_is(run):
    """The state of the third call is what the second has made of it."""
    step = target(lambda w, batch: w - 0.1 * batch)
    w = run(step, jnp.asarray(X), X)
    w = run(step, w, jax.device_put(X, jax.devices()[0]))
    run(step, w, jax.device_put(X, jax.devices()[0]))


@again([("x", CPU, "committed to cpu:1")])
def another_device(run):
    two(run, *(jax.device_put(X, device) for device in jax.devices()[:2]))


@again([("x", CPU, "committed to P() on the mesh (data=1)")])
def a_mesh_of_the_one_device(run):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    two(run, jax.device_put(X, jax.devices()[0]), spread(X, mesh=mesh))


@again(
    [
        (
            "x",
            "committed to P() on the mesh (data=4)",
            "committed to P('data') on the mesh (data=4)",
        )
    ]
)
def an_array_that_is_split(run):
    two(run, spread(X), spread(X, "data"))


@again(
    [
        (
            "x",
            "committed to P('data') on the mesh (data=4)",
            "committed to P('rows') on the mesh (rows=4)",
        )
    ]
)
def an_axis_with_another_name(run):
    two(run, spread(X, "data"), spread(X, "rows", mesh=mesh_of("rows")))


@again(
    [
        (
            "x",
            "committed to P('data') on the mesh (data=4)",
            "committed to P('data') on the explicit mesh (data=4)",
        )
    ]
)
def an_axis_of_another_type(run):
    two(run, spread(X, "data"), spread(X, "data", mesh=jax.make_mesh((4,), ("data",))))


@again([("x", *["committed to P() on the mesh (data=4)"] * 2)])
def devices_in_another_order(run):
    mesh = Mesh(np.array(jax.devices()[::-1]), ("data",))
    two(run, spread(X), spread(X, mesh=mesh))


@again([("x", "in device memory", "in pinned_host memory")])
def another_kind_of_memory(run):
    device = jax.devices()[0]
    kinds = ("device", "pinned_host")
    places = [jax.sharding.SingleDeviceSharding(device, memory_kind=k) for k in kinds]
    two(run, *(jax.device_put(X, place) for place in places))


@again([("state[1]", "uncommitted", "committed to P() on the mesh (data=4)")])
def a_counter_that_was_left_behind(run):
    step = target(lambda state: (0.9 * state[0], state[1] + 1), donate="all")
    state = run(step, (spread(X, "data"), jnp.int32(0)))
    run(step, state)


@again([("w", "uncommitted", "committed to P() on the mesh (data=4)")])
def a_model_that_was_left_behind(run):
    step = target(lambda w, batch: w - 0.1 * jnp.sum(batch))
    batch = spread(X, "data")
    w = run(step, jnp.ones(3), batch)
    run(step, w, batch)


@again(
    [
        (
            "w",
            "committed to P() on the mesh (data=4)",
            "committed to P(None, 'data') on the mesh (data=4)",
        )
    ]
)
def a_sharding_that_the_compiler_chose(run):
    step = target(lambda w, x: w + x)
    x = spread(X, None, "data")
    w = run(step, spread(X), x)
    run(step, w, x)


@once
def places_that_are_the_same(run):
    step = target(lambda x: jnp.sum(x))
    run(step, spread(X, "data"))
    run(step, spread(X, "data", None))
    run(step, spread(X, ("data",)))


@once
def a_state_that_is_kept_in_its_place(run):
    where = NamedSharding(mesh_of("data"), P())
    step = target(
        lambda w, x: jax.lax.with_sharding_constraint(w + x, where),
        donate="all-except-first",
    )
    x = spread(X, None, "data")
    w = spread(X)
    for _ in range(3):
        w = run(step, w, x)


@once
def an_uncommitted_array_of_another_device(run):
    with jax.default_device(jax.devices()[1]):
        elsewhere = jnp.asarray(X)
    two(run, jnp.asarray(X), elsewhere)


@once
def a_model_with_static_parts(run):
    step = target(lambda model, x: jax.vmap(model)(x))
    for seed in range(2):
        model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(seed))
        run(
            step,
            jax.tree.map(
                lambda leaf: spread(leaf) if eqx.is_array(leaf) else leaf, model
            ),
            X,
        )
