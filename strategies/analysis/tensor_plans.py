"""Which projections of a model are split over tensor-parallel ranks, by model family.

A plan maps names to styles, named as in transformers' `base_model_tp_plan`: colwise (outputs are split), rowwise
(inputs are split, outputs summed), fused_colwise_3 (a colwise projection of query, key and value side by
side). Names may contain `*` for a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autoplan.strategies.analysis.structure import Structure

FUSED_STYLE = re.compile(r"fused_colwise_(\d+)")
# What transformers' own plans say that is the same thing here, or nothing to do: a parameter that is replicated
# inside a split region gets its gradient summed in any case, and a table is split by its rows with the head.
_PASSED_OVER = ("replicated_with_grad_allreduce", "replicate", "colwise_gather_output", "embedding_rowwise")

GPT2_PLAN = {
    "transformer.h.*.attn.c_attn": "fused_colwise_3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
# Attributes with a width of the split region, by class name of the module that has them.
_WIDTHS = {"GPT2Attention": ("split_size", "embed_dim", "num_heads")}


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How one model is split.

    Attributes:
        styles: By module name: colwise, rowwise or fused_colwise_n.
        regions: Names of the modules (attention, MLP) whose input is the whole sequence and whose inside is split.
        entry: Where the sequence is split: the input of this module.
        exit: The module after the last block whose output is put together again.
        head: Name of the output head; its rows are the vocabulary.
        vocabulary_tables: Names of the embeddings with as many rows: they are split over the vocabulary with it.
        widths: By module name, the attributes to divide by the degree.
        unit: A degree is legal if it divides this (heads, key-value heads, split widths).
        unit_of: What the unit counts, as text.
    """

    styles: Mapping[str, str]
    regions: tuple[str, ...]
    entry: str
    exit: str
    head: str | None
    vocabulary_tables: tuple[str, ...]
    widths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unit: int
    unit_of: str


def find_tensor_plan(model: nn.Module, structure: Structure, own: Mapping[str, str] | None = None) -> TensorPlan | str:
    """The plan of a model, or the reason why there is none.

    Args:
        model: The model; the meta device is enough.
        structure: Its structure.
        own: The user's plan (`Workload.tensor_plan`), which is preferred to the built-in ones.
    """
    patterns = own if own is not None else _known_patterns(model)
    if isinstance(patterns, str):
        return patterns
    if len(structure.stacks) != 1 or structure.frozen_stacks:
        stacks = len(structure.stacks) + len(structure.frozen_stacks)
        return f"the model has {stacks} stacks of blocks; tensor parallelism is done for one"
    styles: dict[str, str] = {}
    for pattern, style in patterns.items():
        if style in _PASSED_OVER:
            continue
        if style not in ("colwise", "rowwise") and FUSED_STYLE.fullmatch(style) is None:
            return f"its plan says {style!r} for {pattern}, which is not done here (colwise and rowwise are)"
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matches = [(name, module) for name, module in model.named_modules() if regex.fullmatch(name)]
        if not matches and own is not None:
            return f"no module matches {pattern!r} of the plan"
        for name, module in matches:
            if not is_projection(module):
                return f"{name} is a {type(module).__name__}; Linear and Conv1D layers are split"
            styles[name] = style
    if not styles:
        return "its plan names no projection that the model has"
    return _complete(model, structure, styles)


def _complete(model: nn.Module, structure: Structure, styles: dict[str, str]) -> TensorPlan | str:
    regions = tuple(dict.fromkeys(name.rpartition(".")[0] for name in styles))
    blocks = [name for name, _ in structure.blocks]
    outside = [region for region in regions if not any(region.startswith(block + ".") for block in blocks)]
    if outside:
        return f"{outside[0]} lies outside the repeated blocks"
    for region in regions:
        if not any(styles[name] == "rowwise" for name in styles if name.rpartition(".")[0] == region):
            return f"{region} has split outputs and no rowwise projection that sums them"
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1 and name not in styles:
                    return f"{name}.{own} is not in its tensor-parallel plan"
    parent_name = blocks[0].rpartition(".")[0].rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    prefix = parent_name + "." if parent_name else ""
    children = dict(parent.named_children())
    drops = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    dims = {name: {parameter.dim() for parameter in child.parameters()} for name, child in children.items()}
    norms = [name for name, found in dims.items() if found == {1}]
    entry = prefix + drops[0] if len(drops) == 1 else blocks[0]
    for name, module in model.named_modules():
        within = any(name.startswith(block + ".") for block in blocks)
        if isinstance(module, nn.Dropout) and module.p > 0 and name != entry and not within:
            return f"{name} applies dropout to hidden states that every rank has whole; each would drop other elements"
    tables = _vocabulary_tables(structure)
    head: Any = None if structure.head is None else structure.head[1]
    for name, module in structure.embeddings:
        if head is not None and name not in tables and module.weight is head.weight:
            return f"{name} ({type(module).__name__}) is tied to the output head, and does more than look up rows"
    unit, unit_of = _unit(model, styles)
    return TensorPlan(
        styles=styles,
        regions=regions,
        entry=entry,
        exit=prefix + norms[-1] if len(norms) == 1 else blocks[-1],
        head=None if structure.head is None else structure.head[0],
        vocabulary_tables=tables,
        widths={
            name: _WIDTHS[type(module).__name__]
            for name, module in model.named_modules()
            if type(module).__name__ in _WIDTHS and name in regions
        },
        unit=unit,
        unit_of=unit_of,
    )


def _vocabulary_tables(structure: Structure) -> tuple[str, ...]:
    """The embeddings of as many rows as the head, in which a row alone decides what is found: it may be scaled."""
    if structure.head is None:
        return ()
    head: Any = structure.head[1]
    rows = head.weight.shape[0]
    return tuple(
        name
        for name, module in structure.embeddings
        if isinstance(module, nn.Embedding)
        and module.num_embeddings == rows
        and module.max_norm is None
        and len(list(module.parameters())) == 1
    )


def _known_patterns(model: nn.Module) -> Mapping[str, str] | str:
    if type(model).__name__ == "GPT2LMHeadModel":
        if getattr(model.config, "add_cross_attention", False):
            return "GPT-2 with cross-attention has no tensor-parallel plan here"
        return GPT2_PLAN
    config = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return (
            f"{type(model).__name__} has no tensor-parallel plan: transformers gives none for it, and the workload "
            "names none (Workload.tensor_plan maps projection names to colwise or rowwise)"
        )
    prefix = getattr(model, "base_model_prefix", "")
    prefix = prefix + "." if prefix and hasattr(model, prefix) else ""
    return {prefix + name: style for name, style in plan.items()}


def is_projection(module: nn.Module) -> bool:
    """A plain Linear, or transformers' Conv1D (a linear layer with a transposed weight)."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _unit(model: nn.Module, styles: Mapping[str, str]) -> tuple[int, str]:
    """The number that a degree must divide, from the config's heads and all split widths; and a text about it."""
    widths = []
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        transposed = type(module) is not nn.Linear
        outputs, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
        fused = FUSED_STYLE.fullmatch(style)
        widths.append(inputs if style == "rowwise" else outputs // (int(fused.group(1)) if fused else 1))
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    key_values = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(key_values, int):
        what = f"{heads} attention heads" + ("" if key_values == heads else f", {key_values} key-value heads")
        return math.gcd(heads, key_values, *widths), what
    return math.gcd(*widths), f"split widths {', '.join(map(str, sorted(set(widths))))}"
