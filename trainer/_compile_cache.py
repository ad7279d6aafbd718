"""Compiled programs on disk, for the processes that come later."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def keep_compiled(folder: str | os.PathLike[str]) -> None:
    """Let JAX keep what it compiles in a folder, and look there before it compiles.

    It holds for the whole process, and for small programs as well: making a model and
    an optimizer's state compiles dozens of them.

    Raises:
        OSError: The folder cannot be made.
    """
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX looks at the setting before its first compile, and then no more.
    compilation_cache.reset_cache()
