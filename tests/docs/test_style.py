"""The rules for names and sentences refuse what they are for: sentences that stood in this package once."""

import ast

import pytest

from scripts import style


@pytest.mark.parametrize(
    ("docstring", "rule"),
    [
        ("What one rank keeps for one world of ranks.", "first line"),
        ("Whether messages pass through one rank of each machine.", "first line"),
        ("Send.\n\n    Args:\n        number: of the save.\n", "noun first"),
        ("Send.\n\n    Attributes:\n        on_stop: called with that, on the transport's thread.\n", "noun first"),
        ("Save the state.\n\n    It takes its number and tells them, and waits for nobody.", "phrase"),
        ("Open a checkpoint: whoever reads its catalog passes it on.", "phrase"),
        ("Import downwards only, between all rooms.", "phrase"),
    ],
)
def test_old_sentences_are_refused(docstring, rule):
    found = list(style.check_docstring("module.py", docstring, 1))
    assert [violation.rule for violation in found][:1] == [rule]


def test_plain_sentences_pass():
    docstring = """Copy this rank's shards into the staging pool.

    Args:
        number: save number, the same on all ranks.
        on_stop: callback, given the other rank's error; runs on the transport's thread and must not block.

    Returns:
        As many chunks as there is room for in the pool.
    """
    assert list(style.check_docstring("module.py", docstring, 1)) == []


def test_many_parameters_and_fields_are_refused():
    fields = "\n".join(f"    field_{n}: int" for n in range(10))
    source = f"@dataclass\nclass Wide:\n{fields}\n\ndef call({', '.join(f'a{n}' for n in range(10))}): ...\n"
    found = list(style.check_sizes("module.py", ast.parse(source)))
    assert [violation.text.split(":")[0] for violation in found] == ["Wide has 10 fields", "call has 10 parameters"]


def test_a_class_name_stands_for_one_thing(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "ROOT", tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("class Operation: ...\n")
    found = list(style.check_names(sorted(tmp_path.glob("*.py"))))
    assert [violation.path for violation in found] == ["one.py", "two.py"]
