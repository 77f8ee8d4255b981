"""Texts of layouts, and statements other than rules."""

import re

import pytest

from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.layouts import Alias, Layout, Prefix, Rule, Scales, Statement
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.layout import builtin_names, find
from bytecheckpoint.layouts.matching import Side
from bytecheckpoint.layouts.names import parse_template
from bytecheckpoint.layouts.parsed import common_name

EVERYTHING = Layout(
    "every-thing", "a", "b",
    dims={"h": "a.x | b.y * 2 | a.z / 4 + 1"},
    rules=[
        Rule({"{t:02}.w": "q = h", "v": "v = t2"}, {"u": "[q: h | v: t2]"}, same="t", t2=3, when="a.x = 3 and not b.y"),
        Rule({"<x>.norm": "..."}, {"n.<x>": "..."}, names={"a b": "c", "d": "e"}, add=1),
        Rule({"(m.)?z": "h"}, {"z(1|2)": "h"}, mean=()),
    ],
    fits="a.model_type in p q", require=[Statement("", "a.x != 4")], ignore=[Statement("a", "x y.*")],
    optional=[Statement("b", "u.*", "a.x and not b.y")], aliases=[Alias("a", "z2", "v", "a.tied", "z{t}")],
    prefixes=[Prefix("a", "y(1|2)", "y.{[p: a | q: b]}"), Prefix("b", "y", "w", "q")],
    scales=[Scales("a", "<w>_scale", "o i", "<w>", "(o a) (i b)", (("a", 2), ("b", 3)), "blocks")],
)  # fmt: skip


def test_a_layout_equals_its_text():
    text = EVERYTHING.to_text()
    assert Layout.from_text(text) == EVERYTHING, text
    assert Layout.from_text(text.replace("\n", "   # a comment\n\n")) == EVERYTHING


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        ("a.{l}.b", "a.<x>.b", "a.0.b"),
        ("a.{l}.b", "a.{l}.c", None),
        ("(a|b)c", "(d|b)<x>", "bc"),
        ("<x>.a", "b.<y>", "b.a"),
        ("a(.b)?", "a.{l}", None),
        ("a(.b)?", "a", "a"),
        (r"a\{b\}", "a{l}", None),
    ],
)
def test_names_that_fit_two_templates(left, right, common):
    left, right = map(parse_template, (left, right))
    assert common_name(left, right) == common_name(right, left) == common
    if common:
        assert left.match(common) and right.match(common)


def side(tensors, **options):
    return Side(list(tensors), list(tensors.values()), **options)


def names(bound):
    return set(bound.names)


def test_alternatives_and_texts_that_both_sides_share():
    layout = Layout.from_text(
        "layout t a <-> b\nrules\n<x>.(fc2|proj).weight : h f\n  <-> m.<x>.(fc2|proj).weight : f h\n"
        "l.<y> : ...\n  <-> k.<y> : ...\n  names p.1 = q\n  names r = s.1\n"
    )
    left = {"x.1.fc2.weight": (2, 3), "y.proj.weight": (4, 5), "l.p.1": (2, 2), "l.r": ()}
    right = bind(layout, side(left)).right
    assert dict(zip(right.names, right.ndims.tolist(), strict=True)) == {
        "m.x.1.fc2.weight": 2, "m.y.proj.weight": 2, "k.q": 2, "k.s.1": 0
    }  # fmt: skip


TIED = Layout.from_text(
    "layout t hf <-> own\nrules\nembed : v h\n  <-> e : v h\nhead : v h\n  <-> o : h v\nalias hf head = embed "
    "when hf.tied\n"
)
EMBED = {"embed": (3, 2)}


@pytest.mark.parametrize(
    ("hf", "own", "tied", "places"),
    [
        (("embed", "head"), ("e", "o"), False, [2, 2]),
        (("embed", "head"), ("e", "o"), True, [2, 2]),
        (("embed",), ("e", "o"), True, [2, 2]),  # the embedding is the head too
        (("embed", "head"), ("e",), True, [2, 1]),  # both names are filled from one tensor
        (("embed",), ("e",), True, [1, 1]),
        (("embed", "head"), None, True, [2, 1]),  # tied tensors are written once
        (("embed",), None, True, [1, 1]),
        (None, ("e", "o"), True, [1, 1]),
        (("embed", "head"), None, False, [2, 2]),
        (("embed", "head"), ("e",), False, "o is missing on the own side: head of the hf side needs it"),
        (("embed",), ("e", "o"), False, "head is missing on the hf side: o of the own side needs it"),
    ],
)
def test_second_names(hf, own, tied, places):
    shapes = {"embed": (3, 2), "head": (3, 2), "e": (3, 2), "o": (2, 3)}
    sides = [found and side({name: shapes[name] for name in found}) for found in (hf, own)]
    if isinstance(places, str):
        with pytest.raises(CheckpointError, match=places):
            bind(TIED, sides[0], sides[1], {"hf.tied": tied})
        return
    binding = bind(TIED, sides[0], sides[1], {"hf.tied": tied})
    assert [len(binding.left.places), len(binding.right.places)] == places


def test_some_tensors_of_a_side():
    layout = Layout.from_text("layout t a <-> b\nrules\n{l}.w{e} : f h\n  <-> {l}.w : e f h\n")
    left = {f"{k}.w{e}": (2, 3) for k in range(4) for e in range(2)}
    binding = bind(layout, side(left), side({"2.w": (2, 2, 3)}, partial=True))
    assert [binding.left.names[k] for k in binding.left.places.tensor] == ["2.w0", "2.w1"]
    binding = bind(
        layout, side({"2.w1": (2, 3), "3.w0": (2, 3)}, partial=True), side({f"{k}.w": (2, 2, 3) for k in range(4)})
    )
    assert len(binding.left.places) == 2
    with pytest.raises(CheckpointError, match=r"2.w2 has number 2 of \{e\}, but e is 2"):
        bind(layout, side({"2.w2": (2, 3)}, partial=True), side({"2.w": (2, 2, 3)}))


def test_included_layouts(tmp_path):
    (tmp_path / "base.layout").write_text(
        "layout base a <-> b\ndims\n v = a.v\nrules\nx : v\n <-> y : v\nz.{l} : h\n <-> z{l} : h\n"
    )
    (tmp_path / "more.layout").write_text(
        "layout more a <-> b\ninclude base\nrules\nz.{l} : (h k)\n <-> w{l} : (k h)\n  with k = 2\n"
    )
    layout = Layout.read(tmp_path / "more.layout")
    assert names(bind(layout, side({"x": (3,), "z.0": (4,)})).right) == {"y", "w0"}


def test_conditions():
    layout = Layout.from_text(
        "layout t a <-> b\nrules\nx : h\n <-> y : h\n when a.m = one\nx : h\n <-> z : h\n when a.m in two three\n"
    )
    assert names(bind(layout, side({"x": (3,)}), config={"a.m": "one"}).right) == {"y"}
    assert names(bind(layout, side({"x": (3,)}), config={"a.m": "three"}).right) == {"z"}
    with pytest.raises(CheckpointError, match="no rule fits x"):
        bind(layout, side({"x": (3,)}))


REQUIRED = """layout t a <-> b
require a.x | a.y | one = b.x | one
require a.z in 4 b.z
require a.w != b.w when a.x = two
rules
x : h
    <-> y : h
"""


@pytest.mark.parametrize(
    ("config", "undecided"),
    [
        ({"a.x": "two", "a.w": 1, "b.x": "two", "b.w": 2, "a.z": 4}, ""),
        ({"a.k": 1, "b.k": 1, "a.z": 4}, "a.w != b.w"),  # both sides have their defaults, and nobody knows a.x
        ({"a.k": 1, "a.z": 4, "a.x": "one"}, "a.x | a.y | one = b.x | one"),  # no configuration of b
        ({"a.y": "one", "b.k": 1, "a.z": 5, "a.x": None}, "a.z in 4 b.z, a.w != b.w"),
        ({}, "a.x | a.y | one = b.x | one, a.z in 4 b.z, a.w != b.w"),
    ],
)
def test_requirements(config, undecided):
    layout = Layout.from_text(REQUIRED)
    assert Layout.from_text(layout.to_text()) == layout
    assert ", ".join(layout.check_config(config)) == undecided


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a.y": "two", "b.k": 1}, "requires a.x | a.y | one = b.x | one, but a.y is two, b.x is not set"),
        ({"a.k": 1, "b.x": "two"}, "requires a.x | a.y | one = b.x | one, but a.x is not set, b.x is two"),
        ({"a.z": 5, "b.z": 6}, "requires a.z in 4 b.z, but a.z is 5, b.z is 6"),
        ({"a.x": "two", "b.x": "two", "a.w": 1, "b.w": 1}, "requires a.w != b.w, but a.w is 1, b.w is 1"),
    ],
)
def test_requirements_that_are_not_met(config, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Layout.from_text(REQUIRED).check_config(config)


@pytest.mark.parametrize("name", builtin_names())
def test_layouts_that_are_built_in(name):
    layout = find(name)
    assert layout.name == name
    assert Layout.from_text(layout.to_text()) == layout


def test_a_tensor_that_nothing_needs_has_no_sizes():
    layout = Layout.from_text(
        "layout t hf <-> own\nrules\ne : v h\n <-> e : v h\nhead : v = v h\n <-> o : [v: v | ~pad: p] h\n"
        "alias hf head = e\n"
    )
    binding = bind(layout, side({"e": (3, 2)}), side({"e": (3, 2)}))
    assert len(binding.left.places) == len(binding.right.places) == 1


PREFIXES = """layout t hf <-> own
include base
prefix hf layers.{l}. = layers.{[main: l | more: m]}.
prefix own dec.{l}. = dec.{l}. for main
prefix own dec.{l}. = more.{m}.(x.)? for more
alias hf layers.{m}.e = e beside layers.{m}.w
dims
    l = hf.layers
rules
layers.{l}.q : q = a
layers.{l}.k : k = a
    <-> dec.{l}.qk : [q: a | k: a]
"""


def test_prefixes_stand_for_others_in_included_rules_too(tmp_path):
    (tmp_path / "base.layout").write_text(
        "layout base hf <-> own\nrules\ne : v h\n <-> e : v h\nlayers.{l}.w : a h\n <-> dec.{l}.w : h a\n"
        "layers.{l}.q : a\n <-> dec.{l}.q : a\n"
    )
    (tmp_path / "t.layout").write_text(PREFIXES)
    layout = Layout.read(tmp_path / "t.layout")
    left = {"e": (4, 3)} | {
        f"layers.{k}.{n}": s for k in range(3) for n, s in (("w", (2, 3)), ("q", (2,)), ("k", (2,)))
    }
    right = {"e": (4, 3)} | {f"{n}.w": (3, 2) for n in ("dec.0", "dec.1", "more.0.x")}
    right |= {f"{n}.qk": (4,) for n in ("dec.0", "dec.1", "more.0.x")}
    assert names(bind(layout, side(left), config={"hf.layers": 2}).right) == set(right)
    derived = bind(layout, right=side(right), config={"hf.layers": 2}).left
    copies = {f"layers.{k}.e" for k in range(3)}
    assert names(derived) == {*left, *copies}
    both = bind(layout, side(left | {"layers.2.e": (4, 3)}), side(right), config={"hf.layers": 2})
    assert not len(both.left.unbound) and not len(both.right.unbound)
    with pytest.raises(
        CheckpointError, match=r"layers.2.e is a second name of e, but has shape \[4, 2\], not \[4, 3\]"
    ):
        bind(layout, side(left | {"layers.2.e": (4, 2)}), side(right), config={"hf.layers": 2})


def test_conditions_of_names_that_are_ignored():
    layout = Layout.from_text("layout t a <-> b\nignore a y.* when b.z\nrules\nx : n\n <-> x : n\n")
    given = {"x": (2,), "y1": (3,)}
    assert bind(layout, side(given), config={"b.z": True}).left.ignored == [1]
    for config in ({}, {"b.z": False}):
        with pytest.raises(CheckpointError, match="no rule fits y1"):
            bind(layout, side(given), config=config)


def test_layouts_that_include_each_other(tmp_path):
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.layout").write_text(f"layout {name} a <-> b\ninclude {other}\n")
    with pytest.raises(CheckpointError, match=r"two.layout includes one.layout includes two.layout: a circle"):
        Layout.read(tmp_path / "one.layout")
    (tmp_path / "llama.layout").write_text("layout llama hf <-> megatron\ninclude llama\nrules\nx : h\n <-> y : h\n")
    assert len(Layout.read(tmp_path / "llama.layout").parsed) == 1 + len(find("llama").parsed)
