"""Walk over modules with the names that they have without wrappers (DDP, FSDP, torch.compile, activation checkpoints)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bytecheckpoint.frameworks.detection import loaded_class

__all__ = ["bare_name", "walk_modules"]

# (module, class, attribute of the wrapped module, whether state_dict hides the attribute already)
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        True,
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module", True),
)


def walk_modules(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Iterate over the modules inside `module`, in the order of a state_dict.

    Yields:
        (prefix in the state_dict, prefix in the bare model, module) for each. A module at two places comes twice.
    """
    wrappers: list[tuple[type, str, bool]] = [
        (nn.parallel.DistributedDataParallel, "module", False),
        (nn.DataParallel, "module", False),
    ]
    for place, name, attribute, hidden in _WRAPPERS:
        if (kind := loaded_class(place, name)) is not None:
            wrappers.append((kind, attribute, hidden))
    return _walk(module, "", "", wrappers)


def _walk(
    module: nn.Module, prefix: str, bare: str, wrappers: list[tuple[type, str, bool]]
) -> Iterator[tuple[str, str, nn.Module]]:
    yield prefix, bare, module
    for name, child in module._modules.items():
        if child is None:
            continue
        child_prefix, child_bare = f"{prefix}{name}.", f"{bare}{name}."
        for kind, attribute, hidden in wrappers:
            if name == attribute and isinstance(module, kind):
                child_bare = bare
                if hidden:
                    child_prefix = prefix
                break
        if child._modules:
            yield from _walk(child, child_prefix, child_bare, wrappers)
        else:
            yield child_prefix, child_bare, child


def bare_name(key: str, prefixes: dict[str, str]) -> str:
    """Return the FQN in the bare model of a state_dict key.

    Args:
        key: the key.
        prefixes: prefix in the state_dict -> prefix in the bare model, as `walk_modules` gives them.
    """
    end = key.rfind(".") + 1
    while (bare := prefixes.get(key[:end])) is None:
        # No module has this prefix, since a hook made the key: use the module above it.
        end = key.rfind(".", 0, end - 1) + 1
    return bare + key[end:]
