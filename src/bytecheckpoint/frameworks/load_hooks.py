"""Modules that hook into load_state_dict: they may keep values that follow from their parameters.

A load fills parameters where they lie. Without the hook, a cache of a product of two weights stays that of the old ones.
"""

from __future__ import annotations

from torch import nn

from bytecheckpoint.frameworks.modules import ModuleScan, OwnTensors
from bytecheckpoint.frameworks.tensors.allocation import is_writable

__all__ = ["run_load_hooks"]


def run_load_hooks(scan: ModuleScan) -> None:
    """Have modules with such hooks load what they hold already.

    Hooks are post-hooks of load_state_dict, and methods `_load_from_state_dict` that are not torch's.
    """
    for scanned in scan.modules:
        prefixes: list[str] = []
        for prefix, module in scanned.owners.items():
            if _has_load_hooks(module) and not prefix.startswith(tuple(prefixes)):
                prefixes.append(prefix)
        own = OwnTensors(scanned) if prefixes else ()
        entries = {key: value.detach() for key, value in scanned.entries.items() if value in own and is_writable(value)}
        for prefix in prefixes:
            inside = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
            scanned.owners[prefix].load_state_dict(inside, strict=False)


def _has_load_hooks(module: nn.Module) -> bool:
    method = type(module)._load_from_state_dict
    return bool(module._load_state_dict_post_hooks) or not getattr(method, "__module__", "").startswith("torch.")
