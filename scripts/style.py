"""Check the countable rules for names and sentences (CONTRIBUTING.md, "Style") in the package's sources.

    python scripts/style.py                      # the package and its pages
    python scripts/style.py src/bytecheckpoint/saving README.md    # these files and folders only

Ruff checks the mood of docstrings (D401) and the line length; this program checks what ruff has no rule for.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "bytecheckpoint"

#: Most parameters of a function and fields of a class.
MOST_FIELDS = 9
#: Lines up to which a module with a single importer belongs into that importer.
FEWEST_LINES = 130

#: A first line that begins so hides its verb or its subject.
FIRST_WORDS = re.compile(r"(What|Which|Who|Whose|Whom|Where|Whether|Those|That|How|As)\b")
#: The line of an attribute or argument that begins so lacks its noun.
NO_NOUN = re.compile(
    r"(of|as|for|what|which|who|whose|whom|where|when|whether|whatever|called|given|gets|takes|tells|hears|the same)\b"
)
#: Phrases that hide a subject or a verb, and what to say instead.
PHRASES = {
    r"\bas given\b": "name the thing",
    r"\bcalled with that\b": "callback, given <noun>",
    r"\bwhoever\b": "name the caller, rank or job",
    r"\bwhatever\b": "any, every, or the noun",
    r"\bof what\b": "name the thing",
    r"\bgo(es)? on with\b": "continues with",
    r"\bgoes on\b": "continues, runs, follows",
    r"\btells\b": "returns, reports, sends, says",
    r"\bhears?\b(?! of it)": "receives",
    r"\bmade up for\b": "compensated, repaired",
    r"\brooms?\b(?! (for|in|left|on|to)\b)": "package, layer",
}
_PHRASES = [(re.compile(pattern, re.IGNORECASE), say) for pattern, say in PHRASES.items()]

#: Functions and classes that may have more parameters or fields, with the reason.
MANY_FIELDS: dict[str, str] = {
    "bytecheckpoint.cli.app.export": "the options of a command",
    "bytecheckpoint.dataloader.recipe.__init__": "keyword options, each with a default",
    "bytecheckpoint.storage.testing.fault_rule.FaultRule": "keyword options, each with a default",
    "bytecheckpoint.tiers.cooldown.CoolStep": "members of a documented JSON object",
    "bytecheckpoint.monitoring.alert.Alert": "members of a documented JSON object",
    "bytecheckpoint.monitoring.analysis.run.RunSummary": "members of a documented JSON object",
    "bytecheckpoint.monitoring.analysis.summary.OperationSummary": "members of a documented JSON object",
    "bytecheckpoint.monitoring.progress.RankProgress": "a message, without nested parts because it is sent often",
    "bytecheckpoint.monitoring.record.RankRecord": "a message that becomes the columns of a documented table",
    "bytecheckpoint.monitoring.simulation.SimulatedRun": "keyword options, each with a default",
    "bytecheckpoint.layouts.statements.Content": "the parts of a text, most with a default",
    "bytecheckpoint.manager.manager.__init__": "keyword options, each with a default",
    "bytecheckpoint.tools.huggingface.export_huggingface": "the keyword options of a call",
    "bytecheckpoint.tools.exporting.export": "the keyword options of a call",
    "bytecheckpoint.options.SaveOptions": "the keyword options of a call",
    "bytecheckpoint.representation.header_writer.build_header": "the fields of a header",
    "bytecheckpoint.handles.LoadReport": "a flat report for users",
    "bytecheckpoint.handles.SaveReport": "a flat report for users",
    "bytecheckpoint.saving.capture.CapturedState": "the parts of a capture, most with a default",
    "bytecheckpoint.representation.shards.LiveState": "the parts of a state that adapters capture, each with a default",
    "bytecheckpoint.frameworks.base.Destination": "the parts of a load plan that adapters add to, each with a default",
    "bytecheckpoint.planning.planned_rows.SavePlan": "the columns of one table",
    "bytecheckpoint.representation.catalog.StorageFile": "the columns of one table",
    "bytecheckpoint.representation.catalog.Catalog": "the columns of one table, and what describes its file",
    "bytecheckpoint.representation.tilings.Tilings": "the columns of two tables",
    "bytecheckpoint.representation.catalog_footer._FileColumns": "a record of the format",
    "bytecheckpoint.representation.header_reader.StorageHeader": "a record of the format",
    "bytecheckpoint.representation.shards.LiveShard": "made for every tensor of a save: a second object would cost time",
    "bytecheckpoint.representation.storage_file.EntryRecord": "a record of the format",
    "bytecheckpoint.representation.storage_file.StoredEntry": "a record of the format",
    "bytecheckpoint.loading.load": "a call of the paper, with keyword options",
    "bytecheckpoint.saving.save": "a call of the paper, with keyword options",
    "bytecheckpoint.tuning.Tuning": "a flat list of internal constants",
}
#: Classes that are still to be split. The list only gets shorter.
STILL_WIDE = {
    "bytecheckpoint.collectives.inbox.Inbox",
    "bytecheckpoint.collectives.transport.loop.Loop",
    "bytecheckpoint.collectives.transport.spoke.Spoke",
    "bytecheckpoint.tracing.operation.Operation",
}
#: Small modules with one importer that stay by themselves, with the reason.
SMALL_MODULES: dict[str, str] = {
    "bytecheckpoint.layouts.examples": "its importer is in another package",
    "bytecheckpoint.cli.layout": "a verb of its own",
    "bytecheckpoint.collectives.call_log": "its importer would be longer than 400 lines",
    "bytecheckpoint.collectives.transport.serving": "its importer would be longer than 400 lines",
    "bytecheckpoint.storage.testing.fault_rule": "a FUSE program of the tests loads it without the package",
    "bytecheckpoint.tiers.flush.machine": "its importer is in another package",
    "bytecheckpoint.monitoring.report.trace": "an output format of its own, beside the page",
    "bytecheckpoint.frameworks.coordinates": "all that a world takes from the frameworks",
    "bytecheckpoint.frameworks.fsdp1.adapter": "each framework has such a module",
    "bytecheckpoint.frameworks.megatron.model_facts": "its importer is in another package",
    "bytecheckpoint.formats.rank_files": "each format has such a module",
    "bytecheckpoint.frameworks.objects.streams": "one form of states, beside the others",
    "bytecheckpoint.frameworks.providers.states": "one form of states, beside the others",
}


@dataclass(frozen=True, order=True)
class Violation:
    """One place that breaks a rule.

    Attributes:
        path: file, relative to the repository.
        line: line number, from 1.
        rule: name of the rule.
        text: words found, and advice.
    """

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def check_phrases(path: str, text: str, first_line: int) -> Iterator[Violation]:
    """Yield the banned phrases in a docstring, comment or page."""
    for number, line in enumerate(text.splitlines()):
        for pattern, say in _PHRASES:
            if found := pattern.search(line):
                yield Violation(path, first_line + number, "phrase", f"{found[0]!r}: say {say}")


def check_docstring(path: str, docstring: str, first_line: int) -> Iterator[Violation]:
    """Yield the violations in one docstring."""
    lines = docstring.splitlines()
    if lines and FIRST_WORDS.match(lines[0]):
        yield Violation(path, first_line, "first line", f"{lines[0].strip()!r}: begin with a verb, or with a noun")
    section = False
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped in ("Args:", "Attributes:"):
            section = True
        elif stripped.endswith(":") and stripped[:-1] in ("Returns", "Yields", "Raises", "Examples", "Note"):
            section = False
        elif section and (entry := re.match(r"\s*([*\w, ]+): (.*)", line)) and NO_NOUN.match(entry[2]):
            yield Violation(path, first_line + number, "noun first", f"{entry[1].strip()}: {entry[2]}")
    yield from check_phrases(path, docstring, first_line)


def _fields(node: ast.ClassDef) -> int:
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    struct = any("Struct" in ast.unparse(base) or "NamedTuple" in ast.unparse(base) for base in node.bases)
    if decorated or struct:
        return sum(isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part) for part in node.body)
    names = set()
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            for inner in ast.walk(part):
                targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
                names |= {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    return len(names)


def check_sizes(path: str, tree: ast.Module) -> Iterator[Violation]:
    """Yield functions with too many parameters and classes with too many fields."""
    module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            count, noun = _fields(node), "fields"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count, noun = sum(a.arg not in ("self", "cls") for a in arguments), "parameters"
        else:
            continue
        if count > MOST_FIELDS and f"{module}.{node.name}" not in MANY_FIELDS.keys() | STILL_WIDE:
            yield Violation(path, node.lineno, "size", f"{node.name} has {count} {noun}: group them in a dataclass")


def check_source(file: Path) -> Iterator[Violation]:
    """Yield the violations in one Python file."""
    path, text = str(file.relative_to(ROOT)), file.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            docstring := ast.get_docstring(node, clean=False)
        ):
            yield from check_docstring(path, docstring, node.body[0].lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from check_phrases(path, token.string, token.start[0])
    yield from check_sizes(path, tree)


def check_names(files: list[Path]) -> Iterator[Violation]:
    """Yield public and private class names that stand for two things."""
    places = defaultdict(list)
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append((str(file.relative_to(ROOT)), node.lineno))
    for name, found in sorted(places.items()):
        for path, line in found if len(found) > 1 else ():
            others = ", ".join(other for other, _ in found if other != path)
            yield Violation(path, line, "one name", f"class {name} stands also in {others}")


def check_importers(files: list[Path]) -> Iterator[Violation]:
    """Yield small modules that a single other module imports."""
    importers = defaultdict(set)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers[target].add(file)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name].add(file)
    for file in files:
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        lines = len(file.read_text().splitlines())
        if file.name.startswith("_") or lines >= FEWEST_LINES or module in SMALL_MODULES:
            continue
        if len(importers[module]) == 1:
            (importer,) = importers[module]
            if importer.name == "__init__.py":
                continue  # a part of the package's public face
            path = str(file.relative_to(ROOT))
            yield Violation(path, 1, "one importer", f"{lines} lines, imported by {importer.relative_to(ROOT)} only")


def main(arguments: list[str]) -> int:
    """Print the violations; return 1 if there are any."""
    whole = sorted(PACKAGE.rglob("*.py"))
    pages = [
        page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"
    ]  # records stay as they are
    paths = [Path(argument).resolve() for argument in arguments] or [PACKAGE, *pages, *ROOT.glob("*.md")]
    files = [file for path in paths for file in (sorted(path.rglob("*.[pm][yd]")) if path.is_dir() else [path])]
    found = [v for file in files if file.suffix == ".py" for v in check_source(file)]
    for page in (file for file in files if file.suffix == ".md"):
        found += check_phrases(str(page.relative_to(ROOT)), page.read_text(), 1)
    chosen = {str(file.relative_to(ROOT)) for file in files}
    found += [v for v in (*check_names(whole), *check_importers(whole)) if v.path in chosen]
    for violation in sorted(found):
        print(violation)
    if found:
        print(f"{len(found)} violations", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
