"""The reference has every public name, the index has every page, and links and paths in pages lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import bytecheckpoint
from tests.support.processes import ROOT

DOCS = ROOT / "docs"
READMES = [ROOT / folder / "README.md" for folder in ("benchmarks", "demo", "tests/gpu")]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *READMES,
    *sorted(DOCS.rglob("*.md")),
]
SOURCES = ("src", "tests", "benchmarks", "demo", "scripts", "docs")

_FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_CODE_PATH = re.compile(r"[\w./-]*\w\.(?:py|sh|toml)\b")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its code."""
    return _CODE.sub("code", _FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in _HEADING.findall(text)}


def sections(page: Path) -> dict[str, str]:
    """The text under each heading of the second level, by the heading."""
    first, *rest = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert first
    return dict(section.split("\n", 1) for section in rest)


@pytest.mark.parametrize("name", bytecheckpoint.__all__)
def test_the_reference_has_every_public_name(name: str) -> None:
    reference = (DOCS / "reference.md").read_text(encoding="utf-8")
    # The function `settings` lies in the module of that name.
    full = re.escape(f"bytecheckpoint.{name}").replace(
        "bytecheckpoint\\.settings", r"bytecheckpoint\.settings\.settings"
    )
    assert re.search(rf"^::: {full}$|`{full}`", reference, re.MULTILINE), f"docs/reference.md says nothing of {name}"


def test_the_reference_has_nothing_else() -> None:
    entries = re.findall(
        r"^::: bytecheckpoint\.(.+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {entry.removeprefix("settings.") for entry in entries} <= set(bytecheckpoint.__all__)
    assert len(entries) == len(set(entries))


def test_the_command_line_reference_has_every_verb_and_option() -> None:
    from typer.main import get_command

    from bytecheckpoint.cli.app import app

    verbs = get_command(app).commands
    found = {
        match[1]: heading + text
        for heading, text in sections(DOCS / "reference-cli.md").items()
        if (match := re.match(r"`(\S+)", heading))
    }
    found = {verb.rstrip("`"): text for verb, text in found.items()}
    assert set(found) == set(verbs)
    for verb, command in verbs.items():
        for parameter in command.params:
            for option in (o for o in parameter.opts if o.startswith("--") and o not in ("--json", "--help")):
                assert option in found[verb], f"docs/reference-cli.md says nothing of {verb} {option}"
    synopsis = (DOCS / "reference-cli.md").read_text(encoding="utf-8").split("##")[0]
    assert all(re.search(rf"\b{verb}\b", synopsis) for verb in verbs)


def test_every_extra_is_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = sections(DOCS / "compatibility.md")["Extras"]
    assert all(f"`{extra}`" in table for extra in extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if page.is_relative_to(DOCS):
            assert target.is_relative_to(DOCS) and target.is_file(), f"{page.name}: {link} is no page of the site"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}: {target.name} has no such heading"


def test_the_index_links_every_page() -> None:
    links = _LINK.findall(prose(DOCS / "index.md"))
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links}
    pages = {page for page in DOCS.rglob("*.md") if page.parent.name != "decisions" or page.name == "README.md"}
    missing = pages - linked - {DOCS / "index.md"}
    assert not missing, f"docs/index.md has no link to {sorted(page.relative_to(DOCS).as_posix() for page in missing)}"


@pytest.fixture(scope="module")
def repository_files() -> list[str]:
    files = [*ROOT.iterdir(), *(file for folder in SOURCES for file in (ROOT / folder).rglob("*"))]
    return ["/" + file.relative_to(ROOT).as_posix() for file in files if file.is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_paths_exist(page: Path, repository_files: list[str]) -> None:
    # A path may start at the root, at src/bytecheckpoint, or at any folder: packages write their own files short.
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    for path in (path for code in _CODE.findall(text) for path in _CODE_PATH.findall(code)):
        found = any(file.endswith("/" + path.removeprefix("./")) for file in repository_files)
        assert found, f"{page.name}: the repository has no file {path}"
