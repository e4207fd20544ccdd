"""Golden images for resizing: PIL's bilinear filter, as torchvision's transforms use it on PIL images.

Called, with torch 2.11, torchvision 0.26 and Pillow, as:
    python bench/oracle/image_resize.py bench/oracle/golden

Writes image_resize.png (the source), image_resize_photo.jpg (the same as JPEG) and image_resize.json:
    region    left, top, width, height of a crop; `resized_crop` is it at 24x24
    centre    `Resize(30)` then `CenterCrop(24)` of the whole
    larger    `resized_crop` of a 10x10 region at 24x24
    decoded   PIL's decoding of the JPEG, row by row
    mean_area of a thousand regions of RandomResizedCrop in an image of 500x375
"""
import json
import pathlib
import sys

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize
from torchvision.transforms import functional


def source():
    """Edges, a gradient and fine lines: what a careless filter gets wrong."""
    y, x = np.mgrid[0:60, 0:80]
    red = (x * 3) % 256
    green = np.where((x // 7 + y // 5) % 2, 230, 20)
    blue = np.where((x + 2 * y) % 3 == 0, 255, (y * 4) % 256)
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


def flat(image):
    return np.asarray(image).flatten().tolist()


def mean_area():
    torch.manual_seed(0)
    image = Image.new("RGB", (500, 375))
    regions = [RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(20000)]
    return sum(h * w for _, _, h, w in regions) / len(regions) / (500 * 375)


def main():
    folder = pathlib.Path(sys.argv[1])
    image = source()
    image.save(folder / "image_resize.png")
    image.save(folder / "image_resize_photo.jpg", quality=90)
    left, top, width, height = 13, 4, 51, 37
    golden = {
        "region": [left, top, width, height],
        "resized_crop": flat(functional.resized_crop(image, top, left, height, width, [24, 24])),
        "larger": flat(functional.resized_crop(image, 20, 30, 10, 10, [24, 24])),
        "centre": flat(CenterCrop(24)(Resize(30)(image))),
        "decoded": flat(Image.open(folder / "image_resize_photo.jpg").convert("RGB")),
        "mean_area": mean_area(),
    }
    (folder / "image_resize.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


main()
