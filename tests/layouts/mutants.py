"""Layouts with one edit each, which no test of the layout may take for the right one."""

import random
import re
from collections.abc import Iterator
from copy import copy

from bytecheckpoint.layouts import Layout
from bytecheckpoint.layouts.binding import Binding

TOKEN = r"\.\.\.|\w+|\S"


def whole(layout: Layout, used: Binding | None = None) -> Layout:
    """Return a layout with the rules of those that it includes, without its scales.

    Args:
        layout: the layout.
        used: binding to a model, for the rules and names that it uses.
    """
    rules = [parsed.rule for parsed in layout.parsed]
    if used is not None:
        bound, tensors = {id(group.rule) for group in used.groups}, [*used.left.names]
        rules = [copy(rule) for rule in rules if id(rule) in bound]
        for rule in rules:
            rule.names = {n: other for n, other in rule.names.items() if any(f".{n} " in f"{t} " for t in tensors)}
    ignore, aliases = list(layout.merged("ignore")), list(layout.merged("aliases"))
    return Layout("all", layout.left, layout.right, layout.all_dims, rules, ignore=ignore, aliases=aliases)


def mutants(text: str, rng: random.Random) -> Iterator[str]:
    """Yield texts with one edit of the rules each."""
    lines = text.split("\n")
    places = [k for k, line in enumerate(lines) if " : " in line]
    choices = [k for k, line in enumerate(lines) if line.startswith("    names ")]
    while True:
        edit = rng.choice(["swap", "drop", "transpose", "label", "names", *(["choices"] if choices else [])])
        if edit == "choices":
            # Two tensors change their names on one side.
            k, other = rng.sample(choices, 2)
            (first, one), (second, two) = (lines[n].split(" = ") for n in (k, other))
            changed = dict(enumerate(lines)) | {k: f"{first} = {two}", other: f"{second} = {one}"}
            if one != two:
                yield "\n".join(changed.values())
            continue
        k = rng.choice(places)
        name, _, axes = lines[k].partition(" : ")
        tokens = re.findall(TOKEN, axes)
        words = [i for i, token in enumerate(tokens) if token.isidentifier()]
        if edit == "names":
            other = rng.choice(places)
            second, _, axes_there = lines[other].partition(" : ")
            if other != k and axes_there == axes and ("<->" in second) == ("<->" in name):
                changed = dict(enumerate(lines)) | {k: f"{second} : {axes}", other: f"{name} : {axes}"}
                yield "\n".join(changed.values())
            continue
        if edit == "drop" and words:
            del tokens[rng.choice(words)]
        elif edit == "swap" and len(words) > 1:
            a, b = rng.sample(words, 2)
            tokens[a], tokens[b] = tokens[b], tokens[a]
        elif edit == "transpose" and len(words) > 1 and tokens[-1].isidentifier():
            tokens = [tokens[-1], *tokens[:-1]]
        elif edit == "label":
            other = rng.choice(places)
            if other == k or lines[other].partition(" : ")[2] == axes:
                continue
            tokens = re.findall(TOKEN, lines[other].partition(" : ")[2])
        else:
            continue
        changed = re.sub(r" ([:)\]])", r"\1", re.sub(r"([(\[~]) ", r"\1", " ".join(tokens)))
        if changed != " ".join(axes.split()):
            yield "\n".join([*lines[:k], f"{name} : {changed}", *lines[k + 1 :]])
