"""Work on whole checkpoints: verify, repair, compare, copy, export and remove them, and measure their storage.

Each function takes a path, a storage or an open checkpoint. All names are imported at their first use, and those that need
no torch do not import it.

    from bytecheckpoint import tools
    report = tools.verify("checkpoints/step_100")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytecheckpoint.tools.adoption import AdoptReport, adopt
    from bytecheckpoint.tools.bandwidth import measure
    from bytecheckpoint.tools.catalog_repair import RepairReport, repair
    from bytecheckpoint.tools.comparison import CompareReport, Difference, compare
    from bytecheckpoint.tools.copying import CopyReport, copy
    from bytecheckpoint.tools.export_target import ExportReport
    from bytecheckpoint.tools.exporting import export
    from bytecheckpoint.tools.fingerprints import Fingerprint, fingerprint
    from bytecheckpoint.tools.reading import stream
    from bytecheckpoint.tools.rebuild import GenerationReport
    from bytecheckpoint.tools.removal import Removal, collect_garbage, collect_hot_garbage, remove
    from bytecheckpoint.tools.verification import VerifyFinding, VerifyReport, verify

__all__ = [
    "AdoptReport", "CompareReport", "CopyReport", "Difference", "ExportReport", "Fingerprint", "GenerationReport",
    "Removal", "RepairReport", "VerifyFinding", "VerifyReport", "adopt", "collect_garbage", "collect_hot_garbage",
    "compare", "copy", "export", "fingerprint", "measure", "remove", "repair", "stream", "verify",
]  # fmt: skip

_HOME = {
    "measure": "bandwidth",
    **dict.fromkeys(("AdoptReport", "adopt"), "adoption"),
    "stream": "reading",
    "GenerationReport": "rebuild",
    **dict.fromkeys(("RepairReport", "repair"), "catalog_repair"),
    **dict.fromkeys(("CompareReport", "Difference", "compare"), "comparison"),
    **dict.fromkeys(("CopyReport", "copy"), "copying"),
    "ExportReport": "export_target",
    "export": "exporting",
    **dict.fromkeys(("Fingerprint", "fingerprint"), "fingerprints"),
    **dict.fromkeys(("Removal", "collect_garbage", "collect_hot_garbage", "remove"), "removal"),
    **dict.fromkeys(("VerifyFinding", "VerifyReport", "verify"), "verification"),
}


if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
