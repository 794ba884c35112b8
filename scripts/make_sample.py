"""Make the built-in sample of Fashion-MNIST out of the whole set: the first images of every class.

    python scripts/make_sample.py /usr/share/datasets/fashion-mnist
    offbeat/data/fashion_mnist_sample

Debian's package dataset-fashion-mnist puts the four official files into that folder. The result is
the same to the byte wherever it is made, so a reviewer can check what the package carries.
"""

import gzip
import sys
from pathlib import Path

import numpy as np

NUM_PER_CLASS = {"train": 1000, "t10k": 200}


def write_gz(path: Path, data: bytes) -> None:
    """Compress without a time stamp or a name, so that equal data gives equal bytes."""
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))


def main(source: Path, dest: Path) -> None:
    dest.mkdir(parents=True, exist_ok=True)
    for part, num_per_class in NUM_PER_CLASS.items():
        raw_images = gzip.decompress((source / f"{part}-images-idx3-ubyte.gz").read_bytes())
        raw_labels = gzip.decompress((source / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(raw_images, np.uint8, offset=16).reshape(-1, 28, 28)
        labels = np.frombuffer(raw_labels, np.uint8, offset=8)
        chosen = np.sort(
            np.concatenate([np.flatnonzero(labels == c)[:num_per_class] for c in range(10)])
        )
        size = len(chosen).to_bytes(4, "big")
        head_images = raw_images[:4] + size + raw_images[8:16]
        head_labels = raw_labels[:4] + size
        write_gz(dest / f"{part}-images-idx3-ubyte.gz", head_images + images[chosen].tobytes())
        write_gz(dest / f"{part}-labels-idx1-ubyte.gz", head_labels + labels[chosen].tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
