"""The name under which this package is installed, and the other package that is imported by the same name."""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["DISTRIBUTION", "install_command", "warn_of_other"]

#: `pip install bytecheckpoint` fetches the package of the paper's authors.
DISTRIBUTION = "bytecheckpoint-unified"
#: A file of that package, which this one does not have.
_OTHER = os.path.join("bytecheckpoint", "checkpointer", "base_checkpointer.py")


def install_command(extra: str) -> str:
    """Return the command that installs the package with an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def warn_of_other() -> None:
    """Warn if the package of the paper's authors is installed too: pip mixes the files of both in one folder."""
    for folder in sys.path:
        if os.path.exists(os.path.join(folder, _OTHER)):
            warnings.warn(
                f"the distribution 'bytecheckpoint' of the paper's authors is installed in {folder} beside "
                f"'{DISTRIBUTION}', and both are imported as bytecheckpoint: uninstall both, then install the one you want",
                RuntimeWarning,
                stacklevel=3,
            )
            return
