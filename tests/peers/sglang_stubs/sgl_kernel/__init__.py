"""Stands in for SGLang's CUDA kernels on a machine without any: every name is there, and no call works."""

from collections.abc import Callable

__version__ = "99.0.0"


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return kernel
