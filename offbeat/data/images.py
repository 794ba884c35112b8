"""Changes to whole batches of images at once, on whatever device they are. [n, c, h, w]."""

import math

import torch
from torch import Tensor


def crop_and_flip(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A window of size x size somewhere in each image; half of them mirrored."""
    count, channels, height, width = images.shape
    window = torch.arange(size, device=images.device)
    down = _choose(height - size + 1, count, generator) + window  # [n, size]
    right = _choose(width - size + 1, count, generator)
    mirrored = _choose(2, count, generator)
    right = right + (window - (size - 1) * mirrored).abs()  # from the other end where mirrored
    # one place for all channels: a fraction of the time that an index of four dimensions takes
    places = (down[:, :, None] * width + right[:, None, :]).flatten(1)
    crops = images.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))
    return crops.view(count, channels, size, size)


def centre_crop(images: Tensor, size: int) -> Tensor:
    top, left = ((length - size) // 2 for length in images.shape[2:])
    return images[:, :, top : top + size, left : left + size]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images mirrored, from left to right."""
    mirrored = _choose(2, len(images), generator)[:, :, None, None] == 1
    return torch.where(mirrored, images.flip(3), images)


def change_brightness(images: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Something between -most and most added to each image."""
    return images + _draw(images, -most, most, generator)


def change_contrast(images: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Each channel's distance from its mean, times one factor per image."""
    means = images.mean(dim=(2, 3), keepdim=True)
    return (images - means) * _draw(images, low, high, generator) + means


def standardise(images: Tensor) -> Tensor:
    """Each image to mean 0 and deviation 1; one without contrast is not blown up."""
    deviations, means = torch.std_mean(images, dim=(1, 2, 3), correction=0, keepdim=True)
    least = 1 / math.sqrt(images[0].numel())
    return (images - means).div_(deviations.clamp_min(least))


def _choose(options: int, count: int, generator: torch.Generator) -> Tensor:
    """[n, 1]"""
    return torch.randint(0, options, (count, 1), generator=generator, device=generator.device)


def _draw(images: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """[n, 1, 1, 1]"""
    shape = (len(images), 1, 1, 1)
    return torch.empty(shape, device=images.device).uniform_(low, high, generator=generator)
