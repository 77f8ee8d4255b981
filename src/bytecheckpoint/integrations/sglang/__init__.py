"""Serve a checkpoint with SGLang: `--load-format bytecheckpoint` (docs/how-to/serve-with-sglang.md).

SGLang finds `register` by the entry point `sglang.srt.plugins`, in every process of an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["register"]

_FORMAT: Final = "bytecheckpoint"


def register() -> None:
    """Register the load format "bytecheckpoint"."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices([_FORMAT])
    # SGLang takes a class of loaders in the place of a format, but checks texts against its own list.
    place = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(place, _verify_load_format, HookType.AROUND)


def _verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    if config.load_format != _FORMAT:
        original(config)
        return
    from bytecheckpoint.integrations.sglang.loader import SGLangLoader

    config.load_format = SGLangLoader
