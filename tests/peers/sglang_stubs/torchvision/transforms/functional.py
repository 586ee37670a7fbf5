"""Names that are imported, and no function that works."""

from collections.abc import Callable

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*_: object, **__: object) -> None:
        raise NotImplementedError("this torchvision is a stand-in")

    return function
