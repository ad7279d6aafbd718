"""JAX's settings that are a part of every compiled function, and what changed."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
from jax.interpreters import pxla

from trainer._tree import describe
from trainer.recompiles._differences import Difference
from trainer.recompiles._forms import describe_mesh


# Each of these, when it changes, makes JAX 0.10.2 and 0.12.0 compile anew. Those
# that a version does not have are None there, before and after.
_SETTINGS = (
    "check_vma",
    "eager_constant_folding",
    "jax_accurate_erf_inv",
    "jax_allow_f16_reductions",
    "jax_auto_pcast",
    "jax_check_static_indices",
    "jax_custom_jvp3",
    "jax_custom_vjp3",
    "jax_debug_key_reuse",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_embedded_constants_max_bytes",
    "jax_enable_pgle",
    "jax_enable_x64",
    "jax_error_checking_behavior_divide",
    "jax_error_checking_behavior_nan",
    "jax_error_checking_behavior_oob",
    "jax_explicit_x64_dtypes",
    "jax_no_execution",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_pallas_enable_debug_checks",
    "jax_pallas_use_mosaic_gpu",
    "jax_pgle_profiling_runs",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering",
    "jax_raise_on_ppermute_sort_diff",
    "jax_random_seed_offset",
    "jax_remat3",
    "jax_remat_barrier_no_cotangents",
    "jax_remove_size_one_mesh_axis_from_type",
    "jax_scan3",
    "jax_softmax_custom_jvp",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    "jax_use_direct_linearize",
    "jax_use_emit_pipeline_primitive",
    "jax_use_hlo_logistic_lowering",
    "jax_use_shardy_partitioner",
    "jax_use_simplified_jaxpr_constants",
    "jax_xla_profile_version",
)


@final
class Context:
    """JAX's settings and the mesh, as they were when this was made.

    Those that a `with` statement sets for a while, in this thread, are seen as well.

    Attributes:
        settings: Each setting's value, by its name in `jax.config`.
        meshes: The meshes, by what set them.
    """

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] = {
            name: getattr(jax.config, name, None) for name in _SETTINGS
        }
        self.meshes: Mapping[str, Any] = {
            "jax.set_mesh": _mesh_set(),
            "with mesh": _meshes_entered(),
        }

    def differences(self, now: "Context") -> Iterator[Difference]:
        """What is no longer as it was here, and makes every function compile again."""
        for name, was in self.settings.items():
            value = now.settings[name]
            if was != value:
                remedy = f"Set it once, before the first call: `{_update_of(name)}`."
                # Some are members of an enumeration.
                texts = (describe(getattr(x, "value", x)) for x in (was, value))
                yield Difference(name, "context", *texts, remedy=remedy)
        for name, was in self.meshes.items():
            value = now.meshes[name]
            if was != value:
                texts = (
                    " in ".join(map(describe_mesh, reversed(x))) or "no mesh"
                    for x in (was, value)
                )
                yield Difference(name, "context", *texts, remedy=_SAME_MESH)


_SAME_MESH = "Make every call under the same mesh: enter `jax.set_mesh(mesh)` once."


def _update_of(name: str) -> str:
    return f"jax.config.update('{name}', ...)"


def _mesh_set() -> tuple[Any, ...]:
    """The mesh of `jax.set_mesh`, with its devices and the kinds of its axes."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        # While a function is traced there are no devices to ask for.
        mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else (mesh,)


def _meshes_entered() -> tuple[Any, ...]:
    """The meshes of `with mesh`, the outermost first.

    JAX has deprecated that statement, and all that tells of it. Where nothing tells,
    it cannot be named as a cause, and no more is lost.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        resources = getattr(pxla, "thread_resources", None)
    meshes = [each.physical_mesh for each in getattr(resources, "stack", ())]
    return tuple(mesh for mesh in meshes if not mesh.empty)
