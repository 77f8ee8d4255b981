"""Say what DeepSpeed's files say about model-parallel ranks: how these divide parameters, and which layers a file has."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.meanings import StoredTensor, shape_of
from bytecheckpoint.formats.rank_parts import DividedTensor, RankPart, clip_rows, divide, divide_view, replicated
from bytecheckpoint.representation.boxes import row_major_of

__all__ = ["ModelParameters"]

#: Longest regular expression of a foreign file, and most repetitions in it: others could take hours.
_MOST_PATTERN_CHARS, _MOST_REPETITIONS = 200, 3
_AFFINE_VERSION: Final = 1


class ModelParameters:
    """The parameters of the optimizer, and how the ranks of model parallelism divide them.

    Attributes:
        shapes: shapes of the parameters of each rank, by group and name.
        degree: tensor-parallel degree.
        stages: pipeline stage of each parameter; of one that several stages have, the first one.
        divided: division of each parameter of which something says it.
        buffers: names of the buffers of the model.
        dealt: True if the parameters are dealt to the partitions one by one.
    """

    def __init__(self) -> None:
        self.shapes: list[list[dict[str, tuple[int, ...]]]] = []
        self.degree = 1
        self.stages: dict[str, int] = {}
        self.divided: dict[str, DividedTensor] = {}
        self._local: dict[str, dict[int, tuple[int, ...]]] = {}  # by name and tensor-parallel rank
        self._frozen: list[dict[str, Any]] = []
        self.buffers: set[str] = set()
        self.dealt = False

    def add_rank(self, value: Mapping[str, Any]) -> None:
        """Add what the file of a model-parallel rank says."""
        if value["param_shapes"] is None:
            raise IncompatibleCheckpointError(
                "it says no shapes of parameters, as that of a pipeline in bf16 without ZeRO (stage 0): load it with "
                "DeepSpeed, and save it with this package"
            )
        self.shapes.append([{fqn: shape_of(size) for fqn, size in group.items()} for group in value["param_shapes"]])
        self._frozen.append(value.get("frozen_param_shapes") or {})
        self.buffers.update(value["buffer_names"])
        self.dealt = bool(value.get("ds_config", {}).get("zero_optimization", {}).get("round_robin_gradients"))

    def find_stages(self, rest: Mapping[str, Any]) -> None:
        """Find the tensor-parallel degree, and the stage of each parameter."""
        names = [[fqn for group in groups for fqn in group] for groups in self.shapes]
        self.degree = _tensor_degree(names, rest.get("checkpoint_parallel_dimensions"))
        for mp, (groups, frozen) in enumerate(zip(self.shapes, self._frozen, strict=True)):
            stage, rank = divmod(mp, self.degree)
            for fqn, shape in itertools.chain(*(group.items() for group in groups)):
                if self.stages.setdefault(fqn, stage) != stage and not _is_tied(fqn, rest):
                    raise IncompatibleCheckpointError(
                        f"several pipeline stages have {fqn!r}, and nothing says that it is tied"
                    )
                if self._local.setdefault(fqn, {}).setdefault(rank, shape) != shape:
                    raise ValueError(f"the stages have different shapes of {fqn!r}")
            for fqn, size in frozen.items():
                self._local.setdefault(fqn, {})[rank] = shape_of(size)

    def divide(self, rest: Mapping[str, Any], modules: Sequence[Mapping[str, Any]]) -> None:
        """Find out how the ranks divide the parameters; those that are frozen are in the modules."""
        for rank, module in enumerate(modules if self.degree > 1 else ()):
            for name, item in module.items():
                if type(item) is StoredTensor and name not in self.buffers:
                    self._local.setdefault(name, {}).setdefault(rank, item.shape)
        whole = {fqn: of for fqn, of in self._local.items() if len(of) == self.degree}
        shapes = {fqn: [of[rank] for rank in sorted(of)] for fqn, of in whole.items()}
        info = rest.get("universal_checkpoint_info")
        if self.degree == 1:
            self.divided = {fqn: replicated(of_ranks) for fqn, of_ranks in shapes.items()}
        elif type(info) is dict:
            self.divided = _divisions(info, shapes, self.stages)

    def undivided(self) -> list[str]:
        """Return the parameters of which nothing says how they are divided."""
        return sorted(self._local.keys() - self.divided.keys())

    def of_rank(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a tensor-parallel rank."""
        return {fqn: of[rank] for fqn, of in self._local.items() if rank in of}

    def is_copy(self, fqn: str, mp: int) -> bool:
        """Return whether an earlier pipeline stage has the parameter, too."""
        return self.stages[fqn] != mp // self.degree

    def place(self, fqn: str, mp: int) -> tuple[str, DividedTensor, int]:
        """Return the name, the division and the number of the slice that a rank has of a tensor."""
        rank = mp % self.degree
        if fqn in self.divided:
            return fqn, self.divided[fqn], rank
        return f"mp_rank_{rank:02}:{fqn}", replicated([self._local.get(fqn, {}).get(rank, ())]), 0


def _tensor_degree(names: Sequence[Container[str]], dimensions: Any) -> int:
    """Return the tensor-parallel degree: ranks of a stage have equal names of parameters, and follow each other.

    Args:
        names: names of the parameters of each model-parallel rank.
        dimensions: degrees that the file of rank 0 states, if any.

    Raises:
        IncompatibleCheckpointError: the names have no such order.
    """
    degree = next((rank for rank, found in enumerate(names) if found != names[0]), len(names))
    stages = [names[at] for at in range(0, len(names), degree)]
    stated = dimensions.get("tp_degree") if type(dimensions) is dict else None
    if (
        len(names) % degree
        or any(found != stages[rank // degree] for rank, found in enumerate(names))
        or stated not in {None, degree}
    ):
        raise IncompatibleCheckpointError(
            f"the parameters of {len(names)} model-parallel ranks do not say which of these are one stage"
        )
    return degree


def _is_tied(fqn: str, rest: Mapping[str, Any]) -> bool:
    """Return whether a parameter that several pipeline stages have is one parameter."""
    info = rest.get("universal_checkpoint_info")
    patterns = info.get("pipeline_replicated_parameter_patterns") if type(info) is dict else ()
    return fqn.startswith("tied_modules.") or _matching(patterns, fqn) is not None


def _divisions(
    info: Mapping[str, Any], shapes: Mapping[str, Sequence[tuple[int, ...]]], trained: Container[str]
) -> dict[str, DividedTensor]:
    """Return how the ranks divide each tensor, as `universal_checkpoint_info` says it.

    Args:
        info: the entry of a file of a model.
        shapes: shape of the tensor of each rank, by name.
        trained: names of the parameters that the optimizer has: those that no pattern names are divided along dimension 0.
            Other tensors that no pattern names are left out.

    Raises:
        IncompatibleCheckpointError: nothing says it of a parameter, or it is no division into boxes.
    """
    reader = _UniversalInfo(info)
    found = {}
    for fqn, of_ranks in shapes.items():
        try:
            division = reader.division(fqn, of_ranks, fqn in trained)
            if division is not None:
                found[fqn] = division
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise IncompatibleCheckpointError(
                f"universal_checkpoint_info does not say how ranks divide {fqn!r}: {error}"
            ) from None
    return found


def _matching(patterns: Any, fqn: str) -> str | None:
    """Return the first of the patterns that matches a name. Raises ValueError: a pattern is too complex, or none."""
    return next((pattern for pattern in patterns or () if _pattern(pattern).match(fqn)), None)


class _UniversalInfo:
    """The entry of a file that says how the ranks divide parameters."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = info
        self._maps = {}
        if affine := info.get("affine_map"):
            if affine.get("version") != _AFFINE_VERSION:
                raise IncompatibleCheckpointError(f"version {affine.get('version')!r} of affine maps is not read")
            self._maps = affine["params"]

    def division(self, fqn: str, shapes: Sequence[tuple[int, ...]], default: bool) -> DividedTensor | None:
        """Return the division of a tensor; of one that no pattern names, None, or along dimension 0 if `default`."""
        info = self._info
        if reason := _matching(info.get("autotp_unsupported_parameter_patterns"), fqn):
            raise ValueError(info["autotp_unsupported_parameter_patterns"][reason])
        if _matching(info.get("parameter_to_average_patterns"), fqn):
            raise ValueError("it is the mean of the ranks' tensors")
        described = _matching(self._maps, fqn)
        if described and len(self._maps[described]["logical_shape"]) == len(shapes[0]):
            found = _of_map(self._maps[described], shapes)
        elif _matching(info.get("tp_replicated_parameter_patterns"), fqn):
            found = replicated(shapes)
        elif _matching(info.get("parameter_with_2_sub_params_cat_dim_0"), fqn):
            if any(shape[0] % 2 for shape in shapes):
                raise ValueError("half of it is no number of rows")
            found = divide(shapes, 0, [[shape[0] // 2 for shape in shapes]] * 2)
        elif blocks := next(
            (s for s in info.get("parameter_with_sub_params", ()) if _matching(s["patterns"], fqn)), None
        ):
            found = self._of_blocks(blocks, fqn, shapes)
        elif described:
            raise ValueError("its affine map has another number of dimensions")
        elif _matching(info.get("parameter_with_row_parallelism_patterns"), fqn):
            found = divide(shapes, 1)
        elif default or _matching(info.get("vocabulary_parameter_patterns"), fqn):
            found = divide(shapes, 0)
        else:
            return None
        if _matching(info.get("vocabulary_parameter_patterns"), fqn):
            found = clip_rows(found, info["original_vocab_size"])
        return found

    def _of_blocks(self, blocks: Mapping[str, Any], fqn: str, shapes: Sequence[tuple[int, ...]]) -> DividedTensor:
        """Return the division of a fused parameter, whose blocks are divided one by one."""
        view, dim = [*blocks["shape"]], blocks["partition_dim"]
        sizes, ranks = view[dim], len(shapes)
        if type(sizes) is int and self._info.get("universal_checkpoint_version", 0) < 0.4:  # number of equal blocks
            sizes = (sum(shape[dim] for shape in shapes) // sizes,) * sizes
        sizes = (sizes,) if type(sizes) is int else tuple(sizes)
        given = self._info.get("sub_param_shard_widths") or {}
        widths = given.get(_matching(given, fqn))
        if widths is None:
            if any(size % ranks for size in sizes):
                raise ValueError(f"blocks of sizes {sizes} cannot be divided by {ranks} ranks")
            widths = [[size // ranks] * ranks for size in sizes]
        if [*map(sum, widths)] != [*sizes]:
            raise ValueError(f"blocks of widths {widths} do not have the sizes {sizes}")
        plain = [sum(n) if isinstance(n, tuple | list) else n for n in view]
        return divide_view(shapes, plain, dim, widths)


def _pattern(text: Any) -> re.Pattern[str]:
    """Return a regular expression of a foreign file, if it surely matches quickly."""
    repetitions = re.findall(r"(?<!\\)[*+{]", text)
    if len(text) > _MOST_PATTERN_CHARS or len(repetitions) > _MOST_REPETITIONS or re.search(r"\)[*+{?]|\\[1-9]", text):
        raise ValueError(f"the pattern {text[:100]!r} is too complex")
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"the pattern {text[:100]!r} is none: {error}") from None


def _of_map(described: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> DividedTensor:
    """Return the division that an affine map describes; a piece that several ranks have is that of the first one."""
    shape = tuple(described["logical_shape"])
    parts = []
    for rank, local in enumerate(shapes):
        held = described["ranks"][rank]
        if tuple(held["shard_shape"]) != local:
            raise ValueError(f"rank {rank} has shape {list(local)}, its affine map says {held['shard_shape']}")
        for piece in held["pieces"]:
            if piece.get("scale", 1) != 1:
                raise ValueError("it is scaled")
            if min(piece["locations"]) == rank and math.prod(piece["shape"]):
                lengths = tuple(piece["shape"])
                whole, own = (_box_start(piece[key], lengths, of) for key, of in (("source", shape), ("dest", local)))
                parts.append(RankPart(rank, own, lengths, whole))
    return DividedTensor(shape, tuple(shapes), tuple(parts))


def _box_start(place: Any, lengths: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first element of the box that an offset and strides describe. Raises ValueError: they describe none."""
    offset, strides = place
    dense = row_major_of(shape)
    start = []
    for step in dense:
        start.append(offset // step if step else 0)
        offset -= start[-1] * step
    wrong = any(n > 1 and step != expected for n, step, expected in zip(lengths, strides, dense, strict=True))
    if wrong or offset or any(not 0 <= at <= at + n <= size for at, n, size in zip(start, lengths, shape, strict=True)):
        raise ValueError("its affine map describes no boxes")
    return tuple(start)
