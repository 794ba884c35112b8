"""Changes to batches of images: what they do to each image, and that they differ between images."""

import math

import torch

from offbeat.data.images import (
    centre_crop,
    change_brightness,
    change_contrast,
    crop_and_flip,
    flip,
    standardise,
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_every_crop_is_a_window_of_its_own_image() -> None:
    images = torch.arange(200 * 3 * 8 * 8).reshape(200, 3, 8, 8)
    crops = crop_and_flip(images, 6, generator())
    assert crops.shape == (200, 3, 6, 6)
    seen = set()
    for image, crop in zip(images, crops, strict=True):
        found = [
            (mirrored, top, left)
            for mirrored in (False, True)
            for top in range(3)
            for left in range(3)
            if torch.equal(
                image[:, top : top + 6, left : left + 6].flip(2)
                if mirrored
                else image[:, top : top + 6, left : left + 6],
                crop,
            )
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 18, "all places, both ways round"


def test_crops_are_where_the_generator_says() -> None:
    """Down, right, mirrored, in this order: the same seed goes on giving the same crops."""
    images = torch.randint(0, 256, (50, 3, 9, 8), dtype=torch.uint8)
    draw = generator()
    down, right, mirrored = (torch.randint(0, n, (50, 1), generator=draw) for n in (5, 4, 2))
    for number, crop in enumerate(crop_and_flip(images, 5, generator())):
        top, left = int(down[number]), int(right[number])
        expected = images[number, :, top : top + 5, left : left + 5]
        assert torch.equal(crop, expected.flip(2) if mirrored[number] else expected)


def test_bytes_stay_bytes_and_the_whole_image_is_a_crop_too() -> None:
    images = torch.randint(0, 256, (20, 1, 5, 5), dtype=torch.uint8)
    crops = crop_and_flip(images, 5, generator())
    assert crops.dtype == torch.uint8
    same = [torch.equal(a, b) for a, b in zip(images, crops, strict=True)]
    assert 0 < sum(same) < 20


def test_the_centre_is_in_the_middle() -> None:
    image = torch.arange(32 * 32).reshape(1, 1, 32, 32)
    assert torch.equal(centre_crop(image, 24), image[:, :, 4:28, 4:28])


def test_flip_mirrors_about_half() -> None:
    images = torch.randn(400, 1, 2, 3)
    flipped = flip(images, generator())
    mirrored = [torch.equal(a.flip(2), b) for a, b in zip(images, flipped, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(images, flipped, strict=True)]
    assert all(m or k for m, k in zip(mirrored, kept, strict=True))
    assert 150 < sum(mirrored) < 250


def test_brightness_is_one_number_per_image() -> None:
    images = torch.rand(300, 3, 4, 4) * 255
    added = change_brightness(images, 63, generator()) - images
    assert (added.amax((1, 2, 3)) - added.amin((1, 2, 3))).max() < 1e-3
    assert added.min() < -55 and added.max() > 55 and added.abs().max() <= 63.001


def test_contrast_keeps_the_channels_means() -> None:
    images = torch.rand(300, 3, 6, 6) * 255
    changed = change_contrast(images, 0.2, 1.8, generator())
    torch.testing.assert_close(changed.mean((2, 3)), images.mean((2, 3)), rtol=1e-4, atol=1e-2)
    factors = changed.std((2, 3)) / images.std((2, 3))
    torch.testing.assert_close(factors[:, 0], factors[:, 2], rtol=1e-3, atol=1e-3)
    assert 0.19 < factors.min() < 0.3 and 1.7 < factors.max() < 1.81


def test_standardised_images_have_mean_0_and_deviation_1() -> None:
    images = torch.rand(10, 3, 24, 24) * 255
    result = standardise(images)
    torch.testing.assert_close(result.mean((1, 2, 3)), torch.zeros(10), rtol=0, atol=1e-4)
    deviations = result.std((1, 2, 3), correction=0)
    torch.testing.assert_close(deviations, torch.ones(10), rtol=0, atol=1e-4)


def test_an_image_without_contrast_is_not_blown_up() -> None:
    flat = torch.full((1, 3, 24, 24), 7.0)
    flat[0, 0, 0, 0] += 1e-3
    result = standardise(flat)
    assert result.abs().max() <= 1e-3 * math.sqrt(3 * 24 * 24) * 1.01
