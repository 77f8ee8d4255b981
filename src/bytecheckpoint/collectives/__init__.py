"""Communication and agreement among ranks: one small protocol, always with a time limit and failure reports.

`current()` returns the collective of a call: that of a single process, of a torch.distributed process group, or, in
tests, of a `ThreadWorld`.
"""

from __future__ import annotations

from bytecheckpoint.collectives.base import Collective, host_id
from bytecheckpoint.collectives.current import current, use
from bytecheckpoint.collectives.single import SingleProcess
from bytecheckpoint.collectives.testing import ThreadWorld

__all__ = ["Collective", "SingleProcess", "ThreadWorld", "current", "host_id", "use"]
