"""torch's DataLoader on the data that ours loads, with worker processes.

    python bench/peers/loader.py make --out DIR                        # the data: DIR/cifar/*.bin, DIR/jpeg/CLASS/*.jpeg
    python bench/peers/loader.py cifar --data DIR --workers 2 --batch-size 128 --seconds 5 [--manner pil|tensor]
    python bench/peers/loader.py jpeg --data DIR --workers 2 --batch-size 32 --seconds 5

`cifar`: CIFAR-10's binary files, random crop of 32 with padding 4, random flip, normalised. `--manner pil` uses
torchvision's transforms on PIL images, as most programs do; `tensor` works on the bytes, which is the faster way.
`jpeg`: an image folder, random resized crop to 224, random flip, normalised; torchvision's transforms, or the same
by PIL where torchvision cannot be imported.

Out: one JSON line {"samples_per_s", "shape", "mean", "with"}: samples handed to the caller, one after the other, after a
warm-up; the shape of a batch; the mean of a batch's values, so that a loader that does not normalise is found out.
"""

import argparse
import itertools
import json
import math
import pathlib
import random
import sys
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

CIFAR_NORM = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
JPEG_NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WARM_UP = 10


def torchvision_transforms():
    try:
        from torchvision import transforms
    except ImportError:
        return None
    return transforms


class Cifar(Dataset):
    def __init__(self, folder, transform):
        raw = numpy.concatenate([numpy.fromfile(path, numpy.uint8) for path in sorted(folder.glob("*.bin"))])
        records = raw.reshape(-1, 3073)
        self.labels = records[:, 0].astype(numpy.int64)
        self.images = numpy.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


def cifar_by_pil():
    from PIL import Image

    transforms = torchvision_transforms()
    if transforms is None:
        raise SystemExit("--manner pil needs torchvision; try --manner tensor")
    steps = transforms.Compose([
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(*CIFAR_NORM),
    ])
    return lambda image: steps(Image.fromarray(image.transpose(1, 2, 0)))


def cifar_by_tensor():
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CIFAR_NORM)
    scale, shift = 1 / (255 * std), mean / std

    def transform(image):
        padded = numpy.zeros((3, 40, 40), numpy.uint8)
        padded[:, 4:36, 4:36] = image
        top, left = random.randrange(9), random.randrange(9)
        crop = padded[:, top:top + 32, left:left + 32]
        if random.random() < 0.5:
            crop = crop[:, :, ::-1]
        return torch.from_numpy(crop.copy()).float().mul_(scale).sub_(shift)

    return transform


class Jpegs(Dataset):
    def __init__(self, folder, transform):
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [(path, label) for label, kind in enumerate(classes) for path in sorted(kind.glob("*.jpeg"))]
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self.files[index]
        with open(path, "rb") as file:
            return self.transform(Image.open(file).convert("RGB")), label


def random_box(width, height):
    """Part of an image: 8 to 100 % of its area, 3:4 to 4:3, ten tries, else the middle."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def jpeg_transform():
    transforms = torchvision_transforms()
    if transforms is not None:
        return "torchvision", transforms.Compose([
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(*JPEG_NORM),
        ])
    from PIL import Image

    mean, std = (torch.tensor(values).view(3, 1, 1) for values in JPEG_NORM)

    def by_pil(image):
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=random_box(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(mean).div_(std)

    return "PIL", by_pil


def measure(dataset, args, manner):
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True,
                        num_workers=args.workers, persistent_workers=args.workers > 0)
    if len(loader) == 0:
        raise SystemExit(f"{len(dataset)} samples make no batch of {args.batch_size}; try a smaller --batch-size")
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(WARM_UP):
        images, _ = next(batches)
    shape, mean = list(images.shape), images.mean().item()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < args.seconds:
        images, _ = next(batches)
        count += len(images)
    rate = count / (time.perf_counter() - begin)
    print(json.dumps({"samples_per_s": rate, "shape": shape, "mean": mean, "with": manner}))


def make(out):
    """Data of the right form: its content matters to the speed of decoding only, so it is smooth with some noise."""
    rng = numpy.random.default_rng(0)
    (out / "cifar").mkdir(parents=True, exist_ok=True)
    for part in range(1, 6):
        records = rng.integers(0, 256, (10_000, 3073), dtype=numpy.uint8)
        records[:, 0] %= 10
        records.tofile(out / "cifar" / f"data_batch_{part}.bin")
    try:
        from PIL import Image
    except ImportError:
        print("no JPEG files: PIL cannot be imported; try installing pillow", file=sys.stderr)
        return
    for kind, number in itertools.product(range(4), range(100)):
        folder = out / "jpeg" / f"class{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=numpy.uint8))
        smooth = numpy.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), numpy.int16)
        noisy = smooth + rng.integers(-24, 25, smooth.shape, dtype=numpy.int16)
        image = Image.fromarray(noisy.clip(0, 255).astype(numpy.uint8))
        image.save(folder / f"{number:03}.jpeg", quality=85)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "cifar", "jpeg"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--manner", choices=["pil", "tensor"], default="pil")
    args = parser.parse_args()
    if (args.out if args.what == "make" else args.data) is None:
        parser.error("make needs --out, the others --data")
    if args.what == "make":
        make(args.out)
    elif args.what == "cifar":
        transform = cifar_by_pil() if args.manner == "pil" else cifar_by_tensor()
        measure(Cifar(args.data / "cifar", transform), args, f"torch, {args.manner}")
    else:
        name, transform = jpeg_transform()
        measure(Jpegs(args.data / "jpeg", transform), args, f"torch, {name}")


if __name__ == "__main__":
    main()
