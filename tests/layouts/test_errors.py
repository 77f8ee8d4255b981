"""Wrong layouts and wrong checkpoints: each message names the place, the tensor and the numbers."""

import json
import random
import re

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.matching import Side
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.wrappers import WrappedStorage

LLAMA = """\
layout llama  hf <-> megatron  for hf.model_type in llama
dims
    g = hf.num_key_value_heads | hf.num_attention_heads | megatron.num_query_groups
    d = hf.head_dim | megatron.kv_channels | hf.hidden_size / hf.num_attention_heads
require megatron.rotary_interleaved = false
rules
embed.weight                 : v = v h
    <-> word_embeddings.weight : [v: v | ~pad: p] h
layers.{l}.q_proj.weight     : q = (g r d) h
layers.{l}.k_proj.weight     : k = (g d) h
layers.{l}.v_proj.weight     : v = (g d) h
    <-> decoder.{l}.linear_qkv.weight : (g [q: (r d) | k: d | v: d]) h
layers.{l}.experts.{e}.up    : f h
    <-> decoder.{l}.fc1.weight{e} : f h
layers.{l}.norm.weight       : h
    <-> decoder.{l}.(norm.weight|linear_qkv.layer_norm_weight) : h
optional hf layers\\.0\\.norm\\.weight
ignore hf .*inv_freq
"""
HF = {
    "embed.weight": (7, 4),
    **{
        f"layers.{n}.{name}": shape
        for n in range(3)
        for name, shape in {
            "q_proj.weight": (12, 4), "k_proj.weight": (4, 4), "v_proj.weight": (4, 4), "norm.weight": (4,),
            "experts.0.up": (5, 4), "experts.1.up": (5, 4),
        }.items()
    },
}  # fmt: skip
MEGATRON = {
    "word_embeddings.weight": (8, 4),
    **{
        f"decoder.{n}.{name}": shape
        for n in range(3)
        for name, shape in {
            "linear_qkv.weight": (20, 4), "norm.weight": (4,), "fc1.weight0": (5, 4), "fc1.weight1": (5, 4)
        }.items()
    },
}  # fmt: skip
CONFIG = {"hf.num_key_value_heads": 2, "hf.head_dim": 2}

HEAD = "layout t a <-> b\nrules\n"
WRONG_TEXTS = {
    "": "t.layout: expected 'layout NAME LEFT <-> RIGHT [for CONDITION]'",
    "rules\n": "t.layout:1: column 1: expected 'layout NAME LEFT <-> RIGHT [for CONDITION]' before everything else",
    "layout t a b": "t.layout:1: expected 'layout NAME LEFT <-> RIGHT [for CONDITION]'",
    "layout t a <-> a": "layout t: both sides are called 'a'",
    "layout t a <-> b\nrule": "t.layout:2: column 1: expected 'alias', 'prefix', 'scales', 'ignore', 'optional', "
    "'require', 'include', 'dims', 'rules', found 'rule'",
    "layout t a <-> b\nlayout u a <-> b": "t.layout:2: a file has one layout",
    "layout t a <-> b\ndims\n d = a.x +":
        "t.layout: dim 'd': 'a.x +' is no size: write keys and numbers with + - * /, as "
    "hf.hidden_size / 2",
    "layout t a <-> b\ndims\n d = c.x": "t.layout: dim 'd': 'c.x' is of no side: it must begin with a. or b.",
    "layout t a <-> b\ndims\n d = a.x": "t.layout: dim 'd' stands in no rule",
    "layout t a <-> b\nignore c .*": "t.layout:2: 'c' is no side: write a or b",
    "layout t a <-> b\nignore a x when c.d": "t.layout:2: 'c.d' is of no side: it must begin with a. or b.",
    "layout t a <-> b\nprefix a x y": "t.layout:2: expected 'prefix SIDE PREFIX = PREFIX [for PART]'",
    "layout t a <-> b\nprefix c x = y": "t.layout:2: 'c' is no side: write a or b",
    "layout t a <-> b\nprefix a x = {y": "t.layout:2: column 1: '{' in a name without '}'",
    "layout t a <-> b\nprefix a x = y for p\nrules\nx : h\n<-> x : h": "t.layout:4: part 'p' stands on the a side only",
    "layout t a <-> b\nignore a (":
        "t.layout:2: '(' is no regular expression: missing ), unterminated subpattern at position 0",
    "layout t a <-> b\nrequire a.x is 5":
        "t.layout:2: 'a.x is 5' is no condition: write 'KEY', 'not KEY', 'KEY = VALUE' or "
    "'KEY in VALUE VALUE'",
    "layout t a <-> b\nrequire a.x = 5 when c.y": "t.layout:2: 'c.y' is of no side: it must begin with a. or b.",
    "layout t a <-> b\nrequire a.x = a.y | c.z": "t.layout:2: 'c.z' is of no side: it must begin with a. or b.",
    "layout t a <-> b\ninclude ../t": "layout 't': '../t' is no name: use letters, digits, '_', '-' and '.'",
    "layout t a <-> b\ninclude lama": "there is no layout 'lama': did you mean llama?",
    HEAD + "w : (g [q: (r d) | k: d | v: d) h\n<-> u : g": "t.layout:3: column 31: expected '|', found ')' in "
    "'(g [q: (r d) | k: d | v: d) h'",
    HEAD + "w : (g h\n<-> u : g": "t.layout:3: column 9: expected ')', found the end in '(g h'",
    HEAD + "w : [q d]\n<-> u : g": "t.layout:3: column 8: expected ':', found 'd' in '[q d]'",
    HEAD + "w : a b 2\n<-> u : a b": "t.layout:3: column 9: expected an axis, found '2' in 'a b 2'",
    HEAD + "w : ... a ...\n<-> u : a": "t.layout:3: column 11: '...' stands here twice",
    HEAD + "w a b\n<-> u : a b": "t.layout:3: column 1: expected 'NAME : AXES', found 'w a b'",
    HEAD + "w : a b\n": "t.layout:3: the rule of 'w' has no right side: write '<-> NAME : AXES' after it",
    HEAD + "<-> w : a b\n": "t.layout:3: '<->' without a name on the left side before it",
    HEAD + "w.{l : a\n<-> u : a": "t.layout:3: column 3: '{' in a name without '}'",
    HEAD + "w.(a|b : a\n<-> u : a": "t.layout:3: column 3: '(' in a name without ')'; write '\\(' for the character",
    HEAD + "w.{l}{e} : a\n<-> u.{l}.{e} : a":
        "t.layout:3: a number directly beside another digit in 'w.{l}{e}' has no clear end",
    HEAD + "w.(a{e}|b) : a\n<-> u.{e} : a": "t.layout:3: an alternative in 'w.(a{e}|b)' lacks {e}",
    HEAD + "w.<x> : a\n<-> u : a": "t.layout:3: <x> does not stand in all names of the rule",
    HEAD + "w.<m>.<x> : a\n<-> u.<m>.<x> : a\n  names q = wq":
        "t.layout:3: 'names' needs one text, as <x>, in each name of the rule, which has 2: write the others as "
    "alternatives, as (weight|bias)",
    HEAD + "w : q = e h\n<-> u : [q: h]": "t.layout:3: part 'q' has dim 'e' on the a side only",
    HEAD + "w : q = h\n<-> u : [q: h | k: h]": "t.layout:4: part 'k' stands on the b side only",
    HEAD + "w : q = h\nx : q = h\n<-> u : [q: h]": "t.layout:4: part 'q' stands twice on the a side",
    HEAD + "w : h h\n<-> u : h": "t.layout:3: dim 'h' stands twice in the part without a name",
    HEAD + "w : h\n<-> u : h\n  same t":
        "t.layout:3: dim 't' is on both sides: 'same' and 'mean' are for dims that one side lacks",
    HEAD + "w : h\n<-> u : h\n  with t = 2": "t.layout:3: dim 't' does not stand in the rule",
    HEAD + "w.{l} : h\n<-> u.{l} : h\nw.<x> : h\n<-> v.<x> : h":
        "t.layout:5: 'w.0' of the a side fits 'w.{l}' (t.layout:3) too",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG_TEXTS)
def test_wrong_texts(text):
    with pytest.raises(CheckpointError, match=f"^{re.escape(WRONG_TEXTS[text])}$"):
        Layout.from_text(text, "t.layout")


def test_rules_in_python_are_named_by_number():
    with pytest.raises(CheckpointError, match=r"^mine: rule 2: column 3: expected '\]'|^mine: rule 2: "):
        Layout("mine", "a", "b", rules=[Rule({"w": "h"}, {"u": "h"}), Rule({"x": "[q: h"}, {"y": "h"})])


def changed(tensors, *removed, **added):
    kept = {name: shape for name, shape in tensors.items() if name not in removed}
    return kept | {name.replace("__", "."): shape for name, shape in added.items()}


QKV = "decoder.0.linear_qkv.weight"
WRONG_TENSORS = {
    "rows of the fused tensor": (
        HF, changed(MEGATRON, decoder__0__linear_qkv__weight=(16, 4)), CONFIG,
        f"llama.layout:12: dim 0 of {QKV}: 16 here, but (g [q: (r d) | k: d | v: d]) is 20 with g=2, r=3, d=2",
    ),
    "heads of the configuration": (
        HF, MEGATRON, {"hf.num_key_value_heads": 3, "hf.head_dim": 2},
        "llama.layout:10: dim 0 of layers.0.k_proj.weight: 4 here, but (g d) is 6 with g=3, d=2",
    ),
    "sides that disagree": (
        HF, MEGATRON, CONFIG | {"megatron.kv_channels": 4},
            "llama.layout: dim 'd': hf.head_dim is 2, but megatron.kv_channels is 4",
    ),
    "no configuration": (
        HF, MEGATRON, {},
        "llama.layout:9: the sizes of 'g', 'r', 'd' do not follow from the shapes: no configuration here has "
        "hf.num_key_value_heads or hf.num_attention_heads or megatron.num_query_groups for 'g': give it a number under "
        "'dims', or by with_sizes",
    ),
    "a requirement": (HF, MEGATRON, CONFIG | {"megatron.rotary_interleaved": True},
        "llama.layout:5: the layout llama requires megatron.rotary_interleaved = false, but "
        "megatron.rotary_interleaved is True"),
    "dimensions": (
        changed(HF, layers__1__norm__weight=(4, 1)), MEGATRON, CONFIG,
        "llama.layout:15: layers.1.norm.weight has 2 dimensions, but 'h' has 1",
    ),
    "hidden sizes": (
        changed(HF, layers__2__norm__weight=(5,)), MEGATRON, CONFIG,
            "llama.layout:16: dim 0 of decoder.2.norm.weight: 4 here, but h is 5",
    ),
    "more rows than the padded vocabulary": (
        changed(HF, embed__weight=(9, 4)), MEGATRON, CONFIG,

            "llama.layout:8: dim 0 of word_embeddings.weight: 8 here, but no size of 'p' gives [v: v | ~pad: p] that "
            "size with v=9",
    ),
    "unequal experts": (changed(HF, layers__1__experts__1__up=(6, 4)), MEGATRON, CONFIG,
        "llama.layout:14: dim 0 of decoder.1.fc1.weight1: 5 here, but f is 6"),
    "a missing tensor": (changed(HF, "layers.1.k_proj.weight"), MEGATRON, CONFIG,
        "llama.layout:10: layers.1.k_proj.weight is missing on the hf side: decoder.1.linear_qkv.weight of the "
        "megatron side needs it"),
    "a missing expert": (changed(HF, "layers.1.experts.0.up"), MEGATRON, CONFIG,
        "llama.layout:13: layers.1.experts.0.up is missing on the hf side: decoder.1.fc1.weight0 of the megatron "
        "side needs it"),
    "a missing expert at the end": (changed(HF, "layers.1.experts.1.up"), MEGATRON, CONFIG,
        "llama.layout:13: layers.1.experts.1.up is missing on the hf side: decoder.1.fc1.weight1 of the megatron "
        "side needs it"),
    "a missing layer": (changed(HF, *(name for name in HF if name.startswith("layers.1."))), None, CONFIG,
        "llama.layout:9: {l} in the names of the hf side runs from 0 to 2, but 1 is missing, as in "
        "layers.1.q_proj.weight"),
    "a layer too many": (changed(HF, layers__3__norm__weight=(4,)), MEGATRON, CONFIG,
        "llama.layout:16: decoder.3.norm.weight is missing on the megatron side: layers.3.norm.weight of the hf side "
        "needs it"),
    "an unknown tensor": (changed(HF, layers__0__o_proj__weight=(4, 4)), MEGATRON, CONFIG,
        "llama.layout: no rule fits layers.0.o_proj.weight of the hf side; the most similar is "
        "'layers.{l}.q_proj.weight' (llama.layout:9)"),
    "a misspelled tensor": (changed(HF, "embed.weight", embedd__weight=(7, 4)), None, CONFIG,
        "llama.layout: no rule fits embedd.weight of the hf side; the most similar is 'embed.weight' (llama.layout:7)"),
    "two names of one tensor": (HF, changed(MEGATRON, decoder__0__linear_qkv__layer_norm_weight=(4,)), CONFIG,
        "llama.layout:16: decoder.0.norm.weight and decoder.0.linear_qkv.layer_norm_weight name one tensor; "
        "alternatives that not all names of a rule have are spellings: for several tensors write <x>, and 'names'"),
    "two shapes of one tensor": (HF, changed(MEGATRON, decoder__0__linear_qkv__layer_norm_weight=(5,)), CONFIG,
        "llama.layout:16: decoder.0.linear_qkv.layer_norm_weight and decoder.0.norm.weight name one tensor; "
        "alternatives that not all names of a rule have are spellings: for several tensors write <x>, and 'names'"),
    "leading zeros": (changed(HF, "layers.1.norm.weight", layers__01__norm__weight=(4,)), MEGATRON, CONFIG,
        "llama.layout:15: layers.1.norm.weight is missing on the hf side: decoder.1.norm.weight of the megatron side "
        "needs it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors(name):
    left, right, config, message = WRONG_TENSORS[name]
    layout = Layout.from_text(LLAMA, "llama.layout")
    sides = [side and Side(list(side), list(side.values())) for side in (left, right)]
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        bind(layout, sides[0], sides[1], config)


class Reads(WrappedStorage):
    """A storage that notes the name and the end of each read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.ends = []

    def read(self, name):
        data = super().read(name)
        self.ends.append((name, len(data)))
        return data

    def open(self, name):
        reader = super().open(name)
        plain = reader.read_into

        def read_into(offset, buffers):
            self.ends.append((name, offset + sum(map(len, buffers))))
            return plain(offset, buffers)

        reader.read_into = read_into
        return reader


#: Keys of the live side come from a model of Megatron-Core.
ON_DISK = [name for name, (*_, config, _) in WRONG_TENSORS.items() if not any("megatron." in key for key in config)]


def written(folder, tensors, config):
    """Write a folder whose header is longer than the first read of a file; return the first byte of its tensors."""
    arrays = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    save_file(arrays, folder / "model.safetensors", {"padding": " " * (80 << 10)})
    keys = {key.removeprefix("hf."): value for key, value in config.items()}
    (folder / "config.json").write_text(json.dumps(keys | {"model_type": "llama"}))
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


@pytest.mark.parametrize("name", [*ON_DISK, *WRONG_TEXTS])
def test_no_byte_of_a_tensor_is_read(name, tmp_path):
    left, right, config, _ = WRONG_TENSORS.get(name, (HF, MEGATRON, CONFIG, ""))
    begin = written(tmp_path, left, config)
    (tmp_path / "t.layout").write_text(name if name in WRONG_TEXTS else LLAMA)
    storage = Reads(resolve(tmp_path))
    live = {key: torch.full(shape, torch.nan) for key, shape in (right or MEGATRON).items()}
    with pytest.raises(CheckpointError):
        bytecheckpoint.load(storage, {"model": live}, layout=tmp_path / "t.layout")
    assert all(tensor.isnan().all() for tensor in live.values())
    assert all(end <= begin for file, end in storage.ends if file.endswith(".safetensors"))
    assert {file for file, _ in storage.ends} <= {"model.safetensors", "config.json"}
    assert storage.ends or name in WRONG_TEXTS


def test_a_right_layout_reads_the_tensors(tmp_path):
    """The reads above are noted."""
    begin = written(tmp_path, HF, CONFIG)
    storage = Reads(resolve(tmp_path))
    live = {key: torch.full(shape, torch.nan) for key, shape in MEGATRON.items()}
    bytecheckpoint.load(storage, {"model": live}, layout=Layout.from_text(LLAMA))
    assert not any(tensor.isnan().any() for tensor in live.values())
    assert max(end for _, end in storage.ends) > begin


def test_the_layout_itself_is_right():
    layout = Layout.from_text(LLAMA, "llama.layout")
    left = changed(HF, "layers.0.norm.weight", layers__0__rotary__inv_freq=(3,))
    sides = [Side(list(side), list(side.values())) for side in (left, MEGATRON)]
    binding = bind(layout, sides[0], sides[1], CONFIG)
    assert binding.undecided == ["megatron.rotary_interleaved = false"]
    assert [binding.left.names[k] for k in binding.left.unbound] == ["layers.0.rotary.inv_freq"]
    assert [binding.right.names[k] for k in binding.right.unbound] == ["decoder.0.norm.weight"]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("(" * 25 + "a" + ")" * 25, "column 25: axes are nested more than 20 deep"),
        (" ".join(f"[x{k}: a{k} | y{k}: b{k}]" for k in range(30)), "there are more than 1000 parts"),
    ],
)
def test_texts_that_would_take_forever(axes, message):
    with pytest.raises(CheckpointError, match=message):
        Layout.from_text(f"{HEAD}w : {axes}\n <-> u : {axes}\n")
    for name in ("(" * 30 + "a" + "|b)" * 30, "(a|b)" * 30):
        with pytest.raises(CheckpointError, match=r"nested more than 20 deep|more than 1000 choices"):
            Layout.from_text(f"{HEAD}{name} : a\n <-> u : a\n")


@pytest.mark.parametrize("line", ["rules x", "dims : x", "dims y"])
def test_sections_stand_alone(line):
    with pytest.raises(
        CheckpointError,
        match=r"expected 'rules' alone|is no name of a dim|has no right side|expected '(dims|rules)' alone",
    ):
        Layout.from_text(f"{HEAD}w : a\n<-> u : a\n{line}\n")


def test_random_edits_are_refused_or_mean_something():
    rng, parsed = random.Random(5), 0
    pieces = [
        *"(){}[]<>|:~?\\=# \n\tl1.",
        "same t",
        " with a = 2",
        " <-> ",
        "...",
        "{l}",
        "<x>",
        "rules\n",
        "alias hf a = b",
        "{(a b)}",
    ]
    for _ in range(300):
        text = LLAMA
        for _ in range(rng.choice([1, 2, 5])):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(pieces) + text[at + rng.choice([0, 1, 4]) :]
        try:
            layout = Layout.from_text(text)
        except CheckpointError:
            continue
        parsed += 1
        assert Layout.from_text(layout.to_text()) == layout
        for left, right in ((HF, MEGATRON), (HF, None), (None, MEGATRON)):
            try:
                sides = [side and Side(list(side), list(side.values())) for side in (left, right)]
                bind(layout, sides[0], sides[1], CONFIG)
            except CheckpointError:
                pass
    assert parsed > 20


def test_the_most_similar_rule_with_a_text():
    """Numbers and texts of a rule do not make it less similar to a name."""
    layout = Layout.from_text(
        HEAD + "nrom.<x> : h\n<-> u.<x> : h\nblocks.{l}.attn.weight : h\n<-> v.{l}.weight : h\n", "t.layout"
    )
    with pytest.raises(
        CheckpointError, match=r"no rule fits norm.weight of the a side; the most similar is 'nrom.<x>'"
    ):
        bind(layout, Side(["norm.weight"], [(4,)]))
