"""Read the models of Megatron's older checkpoints as they lie: a file `mp_rank_01_000/model_optim_rng.pt` of each rank.

A file has the slices of one tensor-parallel rank, of the layers of one pipeline stage, numbered from 0 in each chunk.
Here the slices are joined, as Megatron-Core divides the parameters of these names, and layers are numbered through, as are
the experts of expert-parallel ranks, whose other tensors are copies. A tensor of another name is one of each rank, called
"mp_rank_00:<name>", for a layout to join. The state of an optimizer follows its parameters, where it is proven which these
are; else the optimizer is left out, and a note says why.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.files import damage, open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.inert import CallRecord
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.megatron_names import other_names
from bytecheckpoint.formats.megatron_optimizers import JoinedOptimizer, RankParameter
from bytecheckpoint.formats.rank_parts import DividedTensor, FlatRanges, divide, replicated
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["MODEL_FILE", "read_megatron_ranks"]

MODEL_FILE: Final = re.compile(r"mp_rank_(\d{2,7})(?:_(\d{3,7}))?(?:_(\d{3,7}))?/model_optim_rng\.pt")
"""Name of a file: tensor-parallel rank, then pipeline stage and expert-parallel rank where there are several."""
_CHUNK = re.compile(r"model(\d{0,7})")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d{1,7})(\..+)")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,7})(\..+)?")
_STACKED_EXPERTS = re.compile(r".*\.experts\.weight[12]")
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
#: Names of parameters that Megatron-Core divides along dimension 0, along dimension 1, and not at all.
_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.weight|.*\.linear_fc1\.weight\d+"
    r"|.*\.(linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)"
)
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight|.*\.linear_fc2\.weight\d+")
_WHOLE = re.compile(
    r".*\.(linear_proj|linear_fc2)\.bias|.*layer_?norm(_weight|_bias|\.weight|\.bias)|embedding\.position_embeddings\.weight"
    r"|.*\.router\.(weight|bias|expert_bias)|.*\.shared_experts\.gate_weight"
)
#: Parameters of latent attention that are divided along dimension 0, or not at all, and the settings that are their rows.
_LATENT = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")
_LATENT_ROWS = {"q": ("q_lora_rank",), "kv": ("kv_lora_rank", "qk_pos_emb_head_dim")}
_OPTIMIZER, _SCHEDULER = "optimizer", "opt_param_scheduler"

#: Parameters of one file by name, whose layers are numbered through.
_Held = dict[str, RankParameter]
#: Number of a file's tensor-parallel rank, pipeline stage and expert-parallel rank.
_Rank = tuple[int, int, int]


def read_megatron_ranks(storage: Storage) -> ForeignCheckpoint:
    """Read a folder with a file of each model-parallel rank."""
    names = [name for name, _ in storage.list()]
    files = {found.groups(): name for name in names if (found := MODEL_FILE.fullmatch(name))}
    if not files:
        raise CheckpointNotFoundError(f"{storage.url} has no files of model-parallel ranks")
    if len({sum(part is not None for part in key) for key in files}) > 1:
        raise IncompatibleCheckpointError(
            f"{storage.url} has files of different numbers of ranks: {listed(sorted(files.values()))}"
        )
    return _Ranks(storage, 1 + max(int(key[0]) for key in files)).read(files, frozenset(names))


class _Ranks:
    """The reader of the files of all model-parallel ranks."""

    def __init__(self, storage: Storage, degree: int) -> None:
        self._storage = storage
        self._degree = degree
        self._experts = 0  # expert-parallel ranks, as the files say
        self._tree = Tree(storage.url)
        self._ranges = FlatRanges(ForeignColumns())
        self._files = TorchFiles(storage, self._ranges.columns)
        self._left_out: list[str] = []
        self._rest: dict[str, Any] = {}
        self._optimizer = JoinedOptimizer(storage, self._files, self._ranges)

    def read(self, files: Mapping[tuple[Any, ...], str], names: frozenset[str]) -> ForeignCheckpoint:
        """Read the files of models, given by the numbers in their names, and others beside them, of all names."""
        chunks: dict[int, dict[tuple[int, int], _Held]] = {}  # of each tensor-parallel rank, by chunk and stage
        ranks: set[_Rank] = set()
        iterations: set[str] = set()
        for key, name in sorted(files.items(), key=str):
            with self._files.open(name) as (file, value), damage(file, "Megatron"):
                args = _args_of(value)
                iterations.add(str(value.get("iteration")))
                ranks.add(rank := _rank_of(key, args))
                self._note_rest(value, args, rank)
                parameters = self._parameters(value)
                flat = name.replace("model_optim_rng.pt", "distrib_optim.pt")
                self._optimizer.name_states(file, flat if flat in names else "", value.get(_OPTIMIZER), parameters)
                for chunk, held in self._chunks(parameters, args, rank).items():
                    chunks.setdefault(rank[0], {}).setdefault((chunk, rank[1]), {}).update(held)
        tensor, stages = (1 + max(rank[k] for rank in ranks) for k in range(2))
        if len(ranks) < tensor * stages * self._experts:
            degrees = f"{tensor} x {stages} x {self._experts}"
            raise CheckpointNotFoundError(
                f"{self._storage.url} has {len(ranks)} files of {degrees} model-parallel ranks"
            )
        for size, count in zip(("tensor", "pipeline"), (tensor, stages), strict=True):
            if (said := self._rest.get("args", {}).get(f"{size}_model_parallel_size", count)) != count:
                raise CheckpointNotFoundError(
                    f"{self._storage.url} has files of {count} {size}-parallel ranks, and its args say {said}"
                )
        if len(iterations) > 1:
            raise IncompatibleCheckpointError(
                f"{self._storage.url} has files of several iterations: {listed(sorted(iterations))}"
            )
        with open_file(self._storage, name) as file, damage(file, "Megatron"):
            self._add([_numbered(chunks[rank]) for rank in sorted(chunks)])
            rows = self._ranges.rows(file)
        if self._left_out:
            self._tree.notes.append(
                f"{len(self._left_out)} extra states of modules are left out: {listed(self._left_out)}"
            )
        numbers, columns = self._ranges.numbers, self._ranges.columns
        states: dict[str, Any] = {"model": {fqn: TensorRef(fqn) for state, fqn in numbers if state == "model"}}
        optimizer, made = self._optimizer.tree(self._rest.get("args", {}))
        if optimizer is not None:
            states[_OPTIMIZER] = optimizer
        if type(self._rest.get(_SCHEDULER)) is dict:
            states[_SCHEDULER] = self._rest.pop(_SCHEDULER)
        states["extra_states"] = self._rest
        values = columns.add_states(states, self._tree)
        facts: dict[str, Any] = {"world_size": len(files)}
        facts |= {"left_out": [self._optimizer.unproven]} if self._optimizer.unproven else {}
        notes, sums = [*self._tree.notes, *self._optimizer.notes], self._files.sums()
        return ForeignCheckpoint("megatron-ranks", columns, values, notes, rows, sums, made, facts)

    def _note_rest(self, value: Mapping[str, Any], facts: Mapping[str, Any], rank: _Rank) -> None:
        """Note what rank 0 has beside the model, and refuse what is divided in another way than usual."""
        if rank == (0, 0, 0):
            self._rest = {
                key: item for key, item in value.items() if key != _OPTIMIZER and not _CHUNK.fullmatch(str(key))
            }
            self._rest |= {"args": facts} if facts else {}
        self._check(facts)

    def _parameters(self, value: Mapping[str, Any]) -> list[RankParameter]:
        """Return the tensors of one file, in the order of the model."""
        found = []
        for key, module in value.items():
            if not (chunk := _CHUNK.fullmatch(str(key))):
                continue
            for name, item in module.items():
                if type(item) is StoredTensor and not name.endswith("_extra_state"):
                    found.append(RankParameter(int(chunk[1] or 0), name, item))
                elif isinstance(item, dict):
                    raise IncompatibleCheckpointError(
                        "the model is of Megatron-LM before Megatron-Core, which is not read"
                    )
                elif item is not None and not (type(item) is StoredTensor and not item.span):
                    self._left_out.append(name)
        return found

    def _chunks(self, parameters: Sequence[RankParameter], facts: Mapping[str, Any], rank: _Rank) -> dict[int, _Held]:
        """Return the tensors of each chunk of one file; of further expert-parallel ranks the experts only."""
        chunks: dict[int, _Held] = {}
        for parameter in parameters:
            held = chunks.setdefault(parameter.chunk, {})
            whole = self._name_of_expert(parameter.name, rank, facts)
            if whole or not rank[2]:
                held[whole or parameter.name] = parameter
        for held in chunks.values():
            if not facts.get("untie_embeddings_and_output_weights", True) and _EMBEDDING not in held:
                held.pop(_HEAD, None)  # the last stage's copy of the embedding
        return chunks

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Refuse what is divided in another way than usual."""
        groups = facts.get("num_query_groups")
        if any("glu_interleave" in key and value for key, value in facts.items()):
            raise IncompatibleCheckpointError("files of ranks of a model with interleaved gates are not read")
        if type(groups) is int and facts.get("group_query_attention") and groups % self._degree:
            raise IncompatibleCheckpointError(
                f"{groups} groups of queries on {self._degree} tensor-parallel ranks are not read"
            )
        if facts.get("num_experts"):
            own = facts.get("expert_tensor_parallel_size") or self._degree
            if own != self._degree:
                raise IncompatibleCheckpointError(
                    f"experts on {own} tensor-parallel ranks, and other layers on {self._degree}, are not read"
                )
        said = facts.get("expert_model_parallel_size") or 1
        if self._experts not in {0, said}:
            raise ValueError(f"experts on {said} ranks, and on {self._experts} in another file")
        self._experts = said
        if self._experts > 1 and (not facts.get("num_experts") or facts["num_experts"] % self._experts):
            raise ValueError(f"{facts.get('num_experts')} experts on {self._experts} ranks")

    def _name_of_expert(self, name: str, rank: _Rank, facts: Mapping[str, Any]) -> str:
        """Return the name of a parameter of an expert, with its number in the whole model; "" for another parameter."""
        if self._experts > 1 and _STACKED_EXPERTS.fullmatch(name):
            raise IncompatibleCheckpointError(f"{name!r} is of several experts, on several expert-parallel ranks")
        if (found := _EXPERT.fullmatch(name)) is None:
            return ""
        count = (facts.get("num_experts") or 0) // self._experts
        if int(found[2]) >= count > 0:
            raise ValueError(f"{name!r} is of none of the {count} experts of a rank")
        return f"{found[1]}{int(found[2]) + rank[2] * count}{found[3] or ''}"

    def _add(self, ranks: Sequence[_Held]) -> None:
        """Add the slices of all tensors."""
        unknown, args = [], self._rest.get("args", {})
        for name in dict.fromkeys(itertools.chain(*ranks)):
            shapes = [held[name].shape for held in ranks if name in held]
            if len(shapes) < len(ranks):
                raise ValueError(f"some tensor-parallel ranks lack {name!r}")
            divided = replicated(shapes) if len(ranks) == 1 else _division(name, shapes, ranks[0], args)
            if divided is None:
                unknown.append(name)
            for rank, held in enumerate(ranks):
                own = (name, divided, rank) if divided else (f"mp_rank_{rank:02}:{name}", replicated([shapes[rank]]), 0)
                self._ranges.add_whole(("model", own[0]), *own[1:], held[name].weight)
                self._optimizer.add(*own, held[name])
        self._add_other_names([name for name in ranks[0] if name not in unknown])
        if unknown:
            self._tree.notes.append(
                f"nothing says how {len(ranks)} tensor-parallel ranks divide {listed(unknown)}: "
                'each of them has tensors "mp_rank_00:<name>", which a layout can join'
            )

    def _add_other_names(self, names: Sequence[str]) -> None:
        """Give norms the names that they have with and without Transformer Engine, as our own adapter does."""
        known, aliases = frozenset(names), self._ranges.columns.aliases.setdefault("model", {})
        for name in names:
            for other in other_names(name):
                linear, _, _ = (name if ".layer_norm_" in name else other).rpartition(".layer_norm_")
                if f"{linear}.weight" in known:
                    aliases[other] = name


def _args_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    args = value.get("args")
    return args.state if type(args) is CallRecord and type(args.state) is dict else {}


def _rank_of(key: tuple[Any, ...], facts: Mapping[str, Any]) -> _Rank:
    """Return the rank of a file; its second number is that of an expert-parallel rank if there is one stage only."""
    tensor, second, third = key
    experts = facts.get("expert_model_parallel_size") or 1
    if third is None and experts > 1 and facts.get("pipeline_model_parallel_size") == 1:
        second, third = None, second
    if int(third or 0) >= experts:
        raise IncompatibleCheckpointError(
            f"it is of expert-parallel rank {int(third)}, and its args say {experts} ranks"
        )
    return int(tensor), int(second or 0), int(third or 0)


def _numbered(chunks: Mapping[tuple[int, int], _Held]) -> _Held:
    """Return the tensors of all chunks, by number of the chunk and stage; layers follow each other in this order."""
    first: dict[str, int] = {}
    found: _Held = {}
    for key in sorted(chunks):
        counts: dict[str, int] = {}
        for name, tensor in chunks[key].items():
            whole = name
            if layer := _LAYER.fullmatch(name):
                counts[layer[1]] = max(counts.get(layer[1], 0), int(layer[2]) + 1)
                whole = f"{layer[1]}{first.get(layer[1], 0) + int(layer[2])}{layer[3]}"
            if whole in found:
                raise IncompatibleCheckpointError(
                    f"several pipeline stages have {whole!r}, and nothing says that it is tied"
                )
            found[whole] = tensor
        for prefix, count in counts.items():
            first[prefix] = first.get(prefix, 0) + count
    return found


def _division(
    name: str, shapes: Sequence[tuple[int, ...]], held: _Held, facts: Mapping[str, Any]
) -> DividedTensor | None:
    """Return how Megatron-Core divides a parameter; None if its name and the args do not say it."""
    if latent := _LATENT.fullmatch(name):
        rows = sum(facts.get(key) or 0 for key in _LATENT_ROWS[latent[1]])
        if sum(shape[0] for shape in shapes) == rows:
            return divide(shapes, 0)
        return replicated(shapes) if shapes[0][0] == rows else None
    if _WHOLE.fullmatch(name):
        return replicated(shapes)
    if _COLUMNS.fullmatch(name):
        return divide(shapes, 1)
    if not _ROWS.fullmatch(name):
        return None
    if ".linear_fc1." in name:  # of gate and up, where it has twice the columns of the next layer
        module, _, parameter = name.rpartition(".linear_fc1.")
        following = held.get(f"{module}.linear_fc2.{parameter.replace('bias', 'weight')}")
        if following is None or len(following.shape) != 2:
            return None
        if shapes[0][0] == 2 * following.shape[1]:
            return divide(shapes, 0, [[following.shape[1]] * len(shapes)] * 2)
        if shapes[0][0] != following.shape[1]:
            return None
    return divide(shapes, 0)
