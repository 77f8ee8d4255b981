"""Models of known families (families/make.py), and moves of whole tensors through a layout."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.lowering import to_parts
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.representation.boxes import BoxTable

FOLDER = Path(__file__).parent / "families"
#: Prediction layers have copies of the embeddings and of the head.
COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)")
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.json"))


def collapsed(shapes):
    """Return the shapes by name, in which * stands for all numbers of which one follows the other."""
    result = {}
    for name, shape in shapes.items():
        result.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), tuple(shape)), []).append(name)
    return {" ".join([pattern, *map(str, shape)]): numbers_of(names) for (pattern, shape), names in result.items()}


def numbers_of(names):
    found = [re.findall(r"(?<=\.)\d+(?=\.)", name) for name in names]
    return " ".join(",".join(numbers) for numbers in found) if found[0] else ""


def expanded(tensors):
    """Return the shapes by name."""
    shapes = {}
    for key, found in tensors.items():
        pattern, *shape = key.split(" ")
        for numbers in found.split() or [""]:
            parts = iter(numbers.split(","))
            shapes[re.sub(r"\*", lambda _, parts=parts: next(parts), pattern)] = tuple(map(int, shape))
    return shapes


def weights(shapes):
    """Return arrays that follow from the names."""
    arrays = {}
    for key, shape in shapes.items():
        name = COPY.sub(lambda found: "model.embed_tokens" if found[1] == "embed_tokens" else "lm_head", key)
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if re.search(r"norm|ln_", name) and name.endswith("weight"):
            values = 1 + 0.3 * values
            values = np.round(64 * values) / 64 if "linear_attn" in name else values  # exact, also around zero
        elif len(shape) > 1 and not re.search(r"embed|wte|wpe", name):
            values *= 1.5 / shape[-1] ** 0.5
        else:
            values *= 0.7
        arrays[key] = values.astype(np.float32)
    return arrays


class Family:
    """A model of a family."""

    def __init__(self, name):
        (file,) = FOLDER.rglob(f"{name}.json")
        read = json.loads(file.read_text())
        self.config, self.ids, self.logits = read["config"], read.get("ids"), np.array(read.get("logits", []))
        self.predicted = np.array(read.get("predicted", []))
        self.shapes = expanded(read["tensors"])
        self.megatron = expanded(read["megatron"]) if "megatron" in read else {}
        self.model_type = self.config["model_type"]

    def derived(self):
        """Return the names in Megatron-Core, as they follow from those in files, which do not say a norm's kind."""
        norms = re.compile(r"(layers\.\d+)\.(input_layernorm|pre_mlp_layernorm)\.")
        change = self.model_type == "nemotron_h"
        return {norms.sub(r"\1.norm.", name) if change else name for name in self.megatron}

    def weights(self):
        return weights(self.shapes)

    def write(self, folder):
        """Write a folder as `save_pretrained` does, with the tensors in two files."""
        folder.mkdir()
        arrays = self.weights()
        half = len(arrays) // 2
        files = {name: f"model-{number // half}.safetensors" for number, name in enumerate(arrays)}
        for file in set(files.values()):
            save_file({name: array for name, array in arrays.items() if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        (folder / "config.json").write_text(json.dumps(self.config))

    def keys(self, config=None, prefix="hf"):
        """Return the configuration with the keys of a layout."""
        return flattened(prefix, self.config if config is None else config)


def table(side, arrays):
    """Return the arrays in the order of the side's names, their boxes and their strides."""
    found = [arrays[name] for name in side.names]
    boxes = BoxTable.build(range(len(found)), [[0] * a.ndim for a in found], [a.shape for a in found])
    strides = np.zeros((len(found), boxes.ndim), np.int64)
    for row, array in zip(strides, found, strict=True):
        row[: array.ndim] = np.array(array.strides) // array.itemsize
    return found, boxes, strides


def part(arrays, boxes, row, offsets, lengths):
    """Return the view of a box of a part."""
    array = arrays[boxes.origin[row]].reshape(-1)
    first = boxes.first[row] + (offsets - boxes.boxes.offsets[row]) @ boxes.strides[row]
    return np.lib.stride_tricks.as_strided(array[first:], lengths, boxes.strides[row] * array.itemsize)


def move(source, target, arrays, binding=None):
    """Return the arrays of the target side; elements that nothing fills are nan. A binding says what rules add."""
    sign = -1 if binding and source is binding.right else 1
    sums = np.zeros(len(binding.sizes)) if binding else None
    for group in binding.groups if binding else ():
        sums[group.start : group.stop] = sign * group.rule.add
    shapes = [[n for n in shape if n >= 0] for shape in target.shapes.tolist()]
    result = {name: np.full(shape, np.nan, np.float32) for name, shape in zip(target.names, shapes, strict=True)}
    have, boxes, strides = table(source, arrays)
    left, _ = to_parts(source.places, boxes, strides, target=False)
    want, boxes, strides = table(target, result)
    right, padding = to_parts(target.places, boxes, strides, target=True)
    pairs = intersect(left.boxes, right.boxes)
    for a, b, offsets, lengths in zip(pairs.left, pairs.right, pairs.offsets, pairs.lengths, strict=True):
        elements = part(have, left, a, offsets, lengths)
        change = sums[left.boxes.tensor[a]] if binding else 0
        part(want, right, b, offsets, lengths)[...] = elements + np.float32(change) if change else elements
    for row in range(len(padding)):
        part(want, padding, row, padding.boxes.offsets[row], padding.boxes.lengths[row])[...] = 0
    return result
