"""MkDocs hook: a navigation entry that ends in "/" becomes all pages of that folder, in order of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _pages(folder: Path, docs: Path) -> list[str]:
    # README.md is the folder's index and comes first.
    found = sorted(folder.glob("*.md"), key=lambda page: (page.stem.lower() not in {"readme", "index"}, page.name))
    return [page.relative_to(docs).as_posix() for page in found]


def on_config(config: Any) -> Any:
    docs = Path(config["docs_dir"])
    entries = []
    for entry in config["nav"]:
        ((title, target),) = entry.items()
        if not target.endswith("/"):
            entries.append(entry)
        elif pages := _pages(docs / target, docs):
            entries.append({title: pages})
    config["nav"] = entries
    return config
