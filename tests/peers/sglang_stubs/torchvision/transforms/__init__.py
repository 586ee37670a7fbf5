"""Names that are imported, and no transform."""

import enum


class InterpolationMode(enum.Enum):
    """The members are looked up by name when their users are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Transform:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("this torchvision is a stand-in")


def __getattr__(name: str) -> type[_Transform]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Transform,), {})
