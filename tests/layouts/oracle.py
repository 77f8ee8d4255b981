"""Layouts by brute force: each element of each tensor is found by its coordinates, one at a time, with a parser of its own.

`moved` copies random shards with random strides from one side of a layout to the other, as a load does.
"""

import itertools
import random
import re

import numpy as np

from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.lowering import to_parts
from bytecheckpoint.layouts.matching import Side
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.representation.boxes import BoxTable


def coordinates(text, sizes):
    """Return (labels, dims) of each coordinate of an axis, in order."""
    tokens = re.findall(r"~?\w+|[()\[\]|:]", text)

    def axis():
        token = tokens.pop(0)
        if token == "(":
            factors = []
            while tokens[0] != ")":
                factors.append(axis())
            tokens.pop(0)
            return [joined(combination) for combination in itertools.product(*factors)]
        if token == "[":
            result = []
            while True:
                label = tokens.pop(0)
                assert tokens.pop(0) == ":"
                result += [((label, *labels), dims) for labels, dims in axis()]
                if tokens.pop(0) == "]":
                    return result
        return [((), {})] if token == "1" else [((), {token: index}) for index in range(sizes[token])]

    result = axis()
    assert not tokens, text
    return result


def joined(coordinates_of_axes):
    labels = tuple(label for labels, _ in coordinates_of_axes for label in labels)
    return labels, {name: index for _, dims in coordinates_of_axes for name, index in dims.items()}


def split_axes(text):
    """Return the texts of the axes of a tensor."""
    axes, depth = [""], 0
    for token in re.findall(r"~?\w+|[()\[\]|:]|\.\.\.", text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token, 0)
        axes[-1] += token + " "
        if depth == 0:
            axes.append("")
    return axes[:-1]


def tensors(families, sizes, dropped=(), texts=("",)):
    """Return, for each name, an array of the elements' keys; None is padding."""
    made = {}
    for text in texts:
        for template, axes in families.items():
            labels, _, axes = axes.rpartition("=")
            pieces = re.split(r"\{(.*?)\}", template.replace("<x>", text))
            widths = [int(hole.partition(":0")[2] or 0) for hole in pieces[1::2]]
            pieces[1::2] = [hole.partition(":0")[0] for hole in pieces[1::2]]
            holes = [
                coordinates(hole if hole[0] in "([" or " " not in hole else f"({hole})", sizes) for hole in pieces[1::2]
            ]
            for numbers in itertools.product(*(range(len(hole)) for hole in holes)):
                of_name = [hole[number] for hole, number in zip(holes, numbers, strict=True)]
                if any(label[0] == "~" for found, _ in of_name for label in found):
                    continue
                name = "".join(
                    itertools.chain(
                        *itertools.zip_longest(pieces[::2], map(str.zfill, map(str, numbers), widths), fillvalue="")
                    )
                )
                along = [coordinates(axis, sizes) for axis in split_axes(axes)]
                array = np.empty([len(axis) for axis in along], object)
                for index in np.ndindex(*array.shape):
                    found, dims = joined([*of_name, *(axis[i] for axis, i in zip(along, index, strict=True))])
                    found = frozenset([*found, *labels.split()])
                    padding = any(label[0] == "~" for label in found)
                    kept = frozenset((k, v) for k, v in dims.items() if k not in dropped)
                    array[index] = None if padding else (text, found, kept)
                made[name] = array
    return made


class Shards:
    """Random boxes of a side's tensors, at random places of one buffer, with random strides."""

    def __init__(self, shapes, rng):
        number, offsets, lengths, strides, bases = [], [], [], [], []
        end = 0
        for k, shape in enumerate(shapes):
            cuts = [
                sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.choice([0, 0, 1, 2])))}) for size in shape
            ]
            for box in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
                lengths_of = [stop - start for start, stop in box]
                stride, step = [0] * len(box), rng.choice([1, 1, 2])
                for d in rng.sample(range(len(box)), len(box)) if rng.random() < 0.5 else range(len(box) - 1, -1, -1):
                    stride[d], step = step, step * lengths_of[d] + rng.choice([0, 0, 0, 3])
                number.append(k)
                offsets.append([start for start, _ in box])
                lengths.append(lengths_of)
                strides.append(stride)
                bases.append(end)
                end += step
        self.boxes = BoxTable.build(number, offsets, lengths)
        self.strides = np.array([[*s, *[0] * (self.boxes.ndim - len(s))] for s in strides], np.int64).reshape(
            len(strides), -1
        )
        self.bases, self.buffer = np.array(bases, np.int64), np.full(end, -1, np.int64)

    def places(self, box):
        """Return the box of the tensor, as slices, and the places of its elements in the buffer."""
        start, length = self.boxes.offsets[box], self.boxes.lengths[box]
        return start, length, self.bases[box] + elements(length, self.strides[box])


def elements(lengths, strides):
    return (np.indices(lengths.tolist()).reshape(len(lengths), -1).T @ strides).reshape(lengths.tolist())


def filled(shards, arrays):
    for box, tensor in enumerate(shards.boxes.tensor.tolist()):
        start, length, places = shards.places(box)
        array = arrays[tensor].reshape([*arrays[tensor].shape, *[1] * (len(start) - arrays[tensor].ndim)])
        shards.buffer[places] = array[tuple(slice(a, a + n) for a, n in zip(start, length, strict=True))]


def moved(binding, source, arrays, rng):
    """Copy the arrays of side `source` to the other side; return those by name. Each element is written exactly once."""
    sides = [binding.left, binding.right]
    if source:
        sides.reverse()
    shapes = [[[n for n in shape if n >= 0] for shape in side.shapes.tolist()] for side in sides]
    have, want = (Shards(shape, rng) for shape in shapes)
    filled(have, [arrays[name] for name in sides[0].names])
    from_parts, _ = to_parts(sides[0].places, have.boxes, have.strides, target=False)
    to, padding = to_parts(sides[1].places, want.boxes, want.strides, target=True)
    written = np.zeros(len(want.buffer), int)
    pairs = intersect(from_parts.boxes, to.boxes)
    for left, right, offsets, lengths in zip(pairs.left, pairs.right, pairs.offsets, pairs.lengths, strict=True):
        places = []
        for found, shards, row in ((from_parts, have, left), (to, want, right)):
            base = shards.bases[found.origin[row]] + found.first[row]
            base += (offsets - found.boxes.offsets[row]) @ found.strides[row]
            places.append(base + elements(lengths, found.strides[row]))
        want.buffer[places[1]] = have.buffer[places[0]]
        np.add.at(written, places[1], 1)
    for row in range(len(padding)):
        places = want.bases[padding.origin[row]] + padding.first[row]
        places = places + elements(padding.boxes.lengths[row], padding.strides[row])
        want.buffer[places] = 0
        np.add.at(written, places, 1)
    result = {name: np.full(shape, -7, np.int64) for name, shape in zip(sides[1].names, shapes[1], strict=True)}
    for box, tensor in enumerate(want.boxes.tensor.tolist()):
        start, length, places = want.places(box)
        assert (written[places] == 1).all(), (sides[1].names[tensor], written[places])
        array = result[sides[1].names[tensor]]
        array = array.reshape([*array.shape, *[1] * (len(start) - array.ndim)])
        array[tuple(slice(a, a + n) for a, n in zip(start, length, strict=True))] = want.buffer[places]
    return result


def check(rule, sizes, *, config=None, texts=("",), seed=0, derive=True):
    """Check a rule, in both directions, with and without given names on the other side, against the coordinates."""
    rng = random.Random(seed)
    layout = Layout("test", "a", "b", rules=[rule])
    keys = [tensors(families, sizes, (*rule.same, *rule.mean), texts) for families in (rule.left, rule.right)]
    numbers = {}
    for array in (*keys[0].values(), *keys[1].values()):
        for key in array.flat:
            numbers.setdefault(key, len(numbers) + 1)
    values = [
        {
            name: np.vectorize(lambda key: numbers[key] if key else 0, otypes=[np.int64])(array)
            for name, array in side.items()
        }
        for side in keys
    ]
    given = [Side(list(side), [array.shape for array in side.values()]) for side in values]
    bound = [(0, bind(layout, given[0], given[1], config)), (1, bind(layout, given[0], given[1], config))]
    if derive:
        bound += [(0, bind(layout, given[0], None, config)), (1, bind(layout, None, given[1], config))]
    for source, binding in bound:
        result = moved(binding, source, values[source], rng)
        assert result.keys() == values[1 - source].keys()
        for name, array in result.items():
            np.testing.assert_array_equal(array, values[1 - source][name], name)


__all__ = ["Rule", "check", "coordinates", "moved", "tensors"]
