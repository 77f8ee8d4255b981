"""Known mappings between programs, and random ones, element by element in both directions (docs/layouts.md)."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts import Rule
from tests.layouts.oracle import check

QKV = "(g [q: (r d) | k: d | v: d])"

MAPPINGS = {
    "llama QKV": (
        {"{l}.q": "q = (g r d) h", "{l}.k": "k = (g d) h", "{l}.v": "v = (g d) h"}, {"layers.{l}.qkv": f"{QKV} h"},
        {"l": 2, "g": 2, "r": 3, "d": 2, "h": 3}, "gd",
    ),
    "QKV biases": (
        {"q": "q = (g r d)", "k": "k = (g d)", "v": "v = (g d)"}, {"qkv": QKV}, {"g": 2, "r": 3, "d": 2}, "gd",
    ),
    "gate and up": (
        {"{l}.gate": "gate = f h", "{l}.up": "up = f h"}, {"{l}.fc1": "[gate: f | up: f] h"}, {"l": 3, "f": 4, "h": 3}, "",
    ),
    "stacked experts": (
        {"{l}.experts.{e}.gate": "gate = f h", "{l}.experts.{e}.up": "up = f h"}, {"{l}.w13": "e [gate: f | up: f] h"},
        {"l": 2, "e": 3, "f": 2, "h": 2}, "",
    ),
    "gpt-oss experts": (
        {"{l}.gate_up": "e h (f [gate: 1 | up: 1])"}, {"{l}.experts.fc1.weight{e}": "[gate: f | up: f] h"},
        {"l": 2, "e": 2, "f": 3, "h": 2}, "",
    ),
    "gpt-2 Conv1D": (
        {"h.{l}.c_attn": "h [q: (n d) | k: (n d) | v: (n d)]"}, {"{l}.qkv": "(n [q: d | k: d | v: d]) h"},
        {"l": 2, "n": 3, "d": 2, "h": 2}, "n",
    ),
    "falcon": ({"{l}.qkv": f"{QKV} h"}, {"layers.{l}.qkv": f"{QKV} h"}, {"l": 2, "g": 2, "r": 2, "d": 2, "h": 2}, "gd"),
    "phi-3": ({"qkv": "[q: (g r d) | k: (g d) | v: (g d)] h"}, {"qkv": f"{QKV} h"}, {"g": 2, "r": 2, "d": 3, "h": 2}, "gd"),
    "rope": ({"q": "(n t d) h"}, {"q": "(n d t) h"}, {"n": 3, "t": 2, "d": 3, "h": 2}, "nt"),
    "MLA down": ({"q": "q = a h", "kv": "kv = c h"}, {"down": "[q: a | kv: c] h"}, {"a": 3, "c": 2, "h": 2}, "ac"),
    "prediction layers": (
        {"layers.{[~main: main | mtp: m]}.eh": "h k"}, {"mtp.{m}.eh": "mtp = h k"},
        {"main": 3, "m": 2, "h": 2, "k": 3}, "m main",
    ),
    "main and prediction layers": (
        {"layers.{[main: l | mtp: m]}.norm": "h"}, {"decoder.{l}.norm": "main = h", "mtp.{m}.norm": "mtp = h"},
        {"l": 3, "m": 2, "h": 2}, "lm",
    ),
    "qwen3-next gated attention": (
        {"q": "(g r [q: d | z: d]) h", "k": "k = (g d) h", "v": "v = (g d) h"},
        {"qkv": "(g [q: (r d) | z: (r d) | k: d | v: d]) h"}, {"g": 2, "r": 2, "d": 2, "h": 2}, "gd",
    ),
    "GDN in_proj": (
        {"qkvz": "(g [q: d | k: d | v: (r w) | z: (r w)]) h", "ba": "(g [b: r | a: r]) h"},
        {"in_proj": "[q: (g d) | k: (g d) | v: (g r w) | z: (g r w) | b: (g r) | a: (g r)] h"},
        {"g": 2, "d": 3, "r": 2, "w": 2, "h": 2}, "gdrw",
    ),
    "GLU interleave": (
        {"fc1": "[gate: (b i) | up: (b i)] h"}, {"fc1": "(b [gate: i | up: i]) h"}, {"b": 3, "i": 2, "h": 2}, "i",
    ),
    "expanded gate": ({"gate": "n h"}, {"gate": "(n d) h"}, {"n": 3, "d": 2, "h": 2}, "d"),
    "vocabulary": ({"embed": "v = v h"}, {"embed": "[v: v | ~pad: p] h"}, {"v": 5, "p": 3, "h": 2}, "vp"),
    "stacked layers": ({"layers.<x>": "l a b"}, {"layers.{l}.<x>": "a b"}, {"l": 3, "a": 2, "b": 2}, ""),
    "pipeline chunks": (
        {"layers.{(v p l)}.w": "h"}, {"rank{p}.chunk{v}.{l}.w": "h"}, {"v": 2, "p": 3, "l": 2, "h": 2}, "vpl",
    ),
    "column rank files": ({"rank{t}.fc": "f h"}, {"fc": "(t f) h"}, {"t": 2, "f": 3, "h": 2}, "t"),
    "GLU rank files": (
        {"rank_{t:02}:<x>fc1": "[gate: f | up: f] h"}, {"<x>fc1": "[gate: (t f) | up: (t f)] h"},
        {"t": 2, "f": 3, "h": 2}, "t",
    ),
    "row rank files": ({"rank{t}.fc": "h f"}, {"fc": "h (t f)"}, {"t": 2, "f": 3, "h": 2}, "t"),
    "replicated rank files": ({"rank{t}.norm": "h"}, {"norm": "h"}, {"t": 3, "h": 4}, "t"),
    "flattened_range": ({"w": "a b (x y)"}, {"w": "(a x) (b y)"}, {"a": 2, "b": 3, "x": 2, "y": 2}, "xyab"),
    "layer pairs": (
        {"layers.{(l [attn: 1 | mlp: 1])}.norm": "h"}, {"{l}.norm1": "attn = h", "{l}.norm2": "mlp = h"},
        {"l": 3, "h": 2}, "",
    ),
    "index offset": ({"layers.{l}.w": "rest = h", "first.w": "first = h"}, {"{[first: 1 | rest: l]}.w": "h"},
        {"l": 3, "h": 2}, "l"),
    "text and vision experts": (
        {"experts.{[gt: e | gv: u]}.gate": "gate = f h", "experts.{[gt: e | gv: u]}.up": "up = f h"},
        {"text": "gt = e [gate: f | up: f] h", "vision": "gv = u [gate: f | up: f] h"},
        {"e": 2, "u": 3, "f": 2, "h": 2}, "eu",
    ),
    "Conv3dToLinear": ({"conv": "o c t h w"}, {"linear": "o (t h w c)"}, {"o": 2, "c": 3, "t": 2, "h": 2, "w": 2}, "cthw"),
    "stacked in parts": (
        {"a.{l}": "a = h", "b": "b = l h"}, {"x.{l}": "[a: h | b: h]"}, {"l": 3, "h": 2}, "",
    ),
    "two sums in one tensor": (
        {"m": "[x: a | y: b] [u: c | w: d]"},
        {"xu": "x u = a c", "xw": "w x = (a d)", "yu": "u y = c b", "yw": "y w = b d"},
        {"a": 2, "b": 3, "c": 1, "d": 2}, "abcd",
    ),
    "scalars": ({"step.{l}": ""}, {"steps": "l"}, {"l": 3}, ""),
}  # fmt: skip
SAME = {"expanded gate": "d", "replicated rank files": "t"}


@pytest.mark.parametrize("name", MAPPINGS)
def test_mapping(name):
    left, right, sizes, known = MAPPINGS[name]
    known = known.split() if " " in known else list(known)
    texts = ("w1", "w2") if any("<x>" in key for key in left) else ("",)
    rule = Rule(left, right, same=SAME.get(name, ""), **{dim: sizes[dim] for dim in known})
    for seed in range(5):
        check(rule, sizes, texts=texts, seed=seed)


class RandomRule:
    """A random rule: some parts of random dims, arranged at random on each side."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.sizes = {name: rng.choice([1, 2, 2, 3, 4]) for name in "abcde"}
        count = rng.choice([1, 1, 2, 3, 4])
        common = rng.sample("abcde", rng.choice([0, 1, 2, 2]))
        others = [name for name in "abcde" if name not in common]
        # Labels of a part: its own, and perhaps that of a group of parts.
        self.parts = {}
        for k in range(count):
            labels = (
                frozenset([f"p{k}", *(["even" if k % 2 == 0 else "odd"] if count > 2 else [])])
                if count > 1
                else frozenset()
            )
            self.parts[labels] = frozenset([*common, *rng.sample(others, rng.choice([0, 1, 1, 2]))])
        self.padding = 0
        self.texts = ("x", "yy") if rng.random() < 0.2 else ("",)
        same = rng.choice("fg") if rng.random() < 0.15 else ""
        self.sizes |= {"f": 2, "g": 3}
        sides = [self.side("left", same if same == "f" else ""), self.side("right", same if same == "g" else "")]
        self.left, self.right, self.same = *sides, same

    def side(self, name, same):
        """Return the families of one side: the parts in groups, each in one family."""
        rng, families = self.rng, {}
        parts = list(self.parts)
        rng.shuffle(parts)
        while parts:
            group = [parts.pop() for _ in range(rng.randint(1, len(parts)))]
            dims = {labels: self.parts[labels] | ({same} if same else set()) for labels in group}
            shared = frozenset.intersection(*map(frozenset, dims.values()))
            outer = rng.sample(sorted(shared), rng.randint(0, len(shared)))
            body = self.sum({labels: (labels, names - set(outer)) for labels, names in dims.items()})
            text, fixed = body
            slots = [*outer, *([text] if text else []), *(["1"] if rng.random() < 0.1 else [])]
            rng.shuffle(slots)
            holes = [slots.pop() for _ in range(rng.choice([0, 0, 0, 1, 2])) if slots]
            axes = []
            while slots:  # neighbours become a product
                width = rng.choice([1, 1, 2, 3])
                taken, slots = slots[:width], slots[width:]
                axes.append(self.product(taken))
            template = (
                f"{name}{len(families)}"
                + "".join(f".{{{hole}}}" for hole in holes)
                + ("<x>" if len(self.texts) > 1 else "")
            )
            if len(self.texts) > 1:
                template = template.replace("<x>", ".<x>")
            families[template] = (f"{' '.join(sorted(fixed))} = " if fixed else "") + " ".join(axes)
        return families

    def product(self, factors):
        factors = [factor for factor in factors if factor]
        if len(factors) > 2 and self.rng.random() < 0.3:
            factors = [factors[0], f"({' '.join(factors[1:])})"]
        return factors[0] if len(factors) == 1 else f"({' '.join(factors)})" if factors else "1"

    def sum(self, parts):
        """Return an axis with all parts, and the labels that are not in it but are common to all parts."""
        rng = self.rng
        if len(parts) == 1:
            ((labels, names),) = parts.values()
            names = sorted(names)
            rng.shuffle(names)
            return (self.product(names) if names else "", labels)
        groups = {}
        by_group = (
            rng.random() < 0.5 and len({min(labels & {"even", "odd"}, default="") for labels, _ in parts.values()}) > 1
        )
        for key, (labels, names) in parts.items():
            own = next(label for label in sorted(labels) if (label in ("even", "odd")) == by_group)
            groups.setdefault(own, {})[key] = (labels - {own}, names)
        terms, rests = [], []
        for label, members in groups.items():
            text, rest = self.sum(members)
            terms.append((label, text or "1"))
            rests.append(rest)
        common = frozenset.intersection(*rests)
        terms = [self.labelled(label, text, rest - common) for (label, text), rest in zip(terms, rests, strict=True)]
        if rng.random() < 0.2:
            self.padding += 1
            self.sizes[f"z{self.padding}"] = rng.randint(0, 3)
            terms.append(f"~pad: z{self.padding}")
        rng.shuffle(terms)
        return f"[{' | '.join(terms)}]", common

    def labelled(self, label, text, rest):
        for more in sorted(rest):
            text = f"[{more}: {text}]"
        return f"{label}: {text}"

    def check(self):
        names = " ".join([*self.left, *self.left.values(), *self.right, *self.right.values()])
        words = set(re.findall(r"\w+", names))
        used = {name: size for name, size in self.sizes.items() if name in words}
        given = {name: size for name, size in used.items() if self.rng.random() < 0.5}
        seed = self.rng.random()
        try:  # what follows from the shapes need not be given
            check(Rule(self.left, self.right, same=self.same, **given), used, texts=self.texts, seed=seed, derive=False)
        except IncompatibleCheckpointError as error:
            if "not follow from" not in str(error):
                raise
        check(Rule(self.left, self.right, same=self.same, **used), used, texts=self.texts, seed=seed)


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_random_rules(seed):
    RandomRule(seed).check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_random_rules():
    for seed in range(10_000):
        RandomRule(seed).check()
