"""As the transforms of the first version."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
