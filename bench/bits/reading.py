"""What a run left: events, tensors and files, as plain values that are equal where their bits are."""
import glob
import hashlib
import json
import os
import re
import struct

# Fields of an event that time decides.
TIMED = re.compile(r"^time$|_per_s$|_ms$|_seconds$|^eta$")
GENERATORS = re.compile(r"^\d+\.(cpu|cuda)")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def file_hash(path):
    with open(path, "rb") as file:
        return sha256(file.read())


def folder_hash(folder):
    """Over names and bytes of all files."""
    whole = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(folder, "**"), recursive=True)):
        if os.path.isfile(path):
            whole.update(f"{os.path.relpath(path, folder)} {file_hash(path)}\n".encode())
    return whole.hexdigest()


def events(path):
    """Steps and evaluations in their order; numbers are the text that stands in the file."""
    found = {"steps": [], "evals": []}
    with open(path, encoding="utf-8") as file:
        for line in file:
            event = json.loads(line, parse_float=str, parse_int=str)
            kind = event.pop("kind")
            if f"{kind}s" in found:
                found[f"{kind}s"].append({key: value for key, value in event.items() if not TIMED.search(key)})
    return found


def run_event(path):
    """What the first line says of the process."""
    with open(path, encoding="utf-8") as file:
        event = json.loads(file.readline())
    return {key: event.get(key) for key in ("device", "num_threads", "drumline", "libtorch")}


def tensors(path):
    """Each tensor's hash, over type, shape and bytes: how the file is laid out does not matter."""
    found = {}
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            kind = f"{entry['dtype']} {entry['shape']} ".encode()
            found[name] = sha256(kind + file.read(end - begin))
    return found


def checkpoint(folder):
    """Tensors of a checkpoint: those of the model, those that are trained where the model is an average, the optimizer's, the generators'."""
    found = {"model": {}, "trained": {}, "optimizer": {}, "rng": {}}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        stem = os.path.basename(path).split(".")[0]
        for name, digest in tensors(path).items():
            # In format 2 the names of what is trained differ from the model's.
            name = name.removesuffix(".trained") if stem == "trained" else name
            group = stem if stem in ("model", "trained") else "rng" if GENERATORS.search(name) else "optimizer"
            found[group][name] = digest
    return found


def test_figures(said):
    """The figures of `drumline test`: its line, without the words on which model it was, in an order that does not matter."""
    line = next((line for line in said.splitlines() if "== test:" in line), None)
    if line is None:
        return None
    parts = [part.strip() for part in line.split("== test:")[1].split("|")]
    return " | ".join(sorted(part for part in parts if "/" not in part))


def bleu(said):
    return next((line.split(":", 1)[-1].strip() for line in said.splitlines() if "BLEU" in line), None)


def last_checkpoint(folder, link):
    path = os.path.join(folder, link)
    return os.path.realpath(path) if os.path.exists(path) else None
