"""The operations of a standard transformer, written down instead of traced, in the records that a trace makes.

For published rows and for names without code. One block of width h, with t tokens in a sample, is, forward,

    queries, keys and values (t x (a + 2 kv) x h), attention (4 t^2 a), output (t x h x a),
    up (t x g f x h), down (t x h x f); or router (t x E x h) and E products of t x active / E rows
    passes over memory: norms, residuals, dropout, activation; with plain attention its scores

and backward each product twice, for its input and for its weight (arXiv 2104.04473, appendix). Latent attention (MLA)
has two products for the queries and two for keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1).

All sizes may be numbers, or arrays with an entry per row: the fields of the records are then arrays too, and one pass
over some twenty operations prices any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from autoplan.planner.cost.columns import Bools, Floats
from autoplan.planner.trace.model_profile import (
    PLAIN,
    ZERO,
    LinearFit,
    OperationGroup,
    PeakFit,
    TensorSplit,
    VariantProfile,
)

Number = Any  # a float, or an array with an entry per row
# Operations that a block launches forward, unfused eager: counted. The backward's beside them: tables (vTrain)
BLOCK_LAUNCHES = 26.0
LAUNCH_BACKWARD = 1.7
HEAD_LAUNCHES = 40.0
# Passes of 2 bytes over t h that norms, residuals, dropout and biases make forward, and over t f that the activation
# makes: counted for a plain block of fused kernels. The backward's beside them: tables (vTrain)
BLOCK_PASSES = 18.0
ACTIVATION_PASSES = 5.0
MEMORY_BACKWARD = 1.6
# Plain attention: scores written, softmax and dropout read and written, the mask, read again: counted
SCORE_PASSES = 6.0
# Bytes read and written per logit (16 bits and fp32, log-softmax and its gradient) and per element of the hidden
# states: counted
LOGIT_BYTES = 26.0
HEAD_BYTES = 12.0
# Fused attention's backward, which computes the scores again: 5 products in place of 2 (FlashAttention-2)
FUSED_BACKWARD = 2.5
# Passes that scale, cast and transpose each operand of an fp8 product (Transformer Engine): tables (llm-foundry, fp8)
FP8_PASSES = 8.0
# Selective checkpointing runs attention and half of the element-wise operations again: assumed
PASSES_AGAIN = 0.5
# What a selective per-operation policy keeps beside fused attention: products' results alone. Assumed from the listing
# of arXiv 2205.05198, section 4 (what is kept but is no product's result: about a quarter).
SELECTIVE_KEEPS = 0.75
# Logits that the fused loss holds at once (strategies/techniques/loss_kernels.py, _CHUNK_ELEMENTS).
FUSED_LOSS_ELEMENTS = 2.0**27
AGAIN = "again: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the operations of one sample follow from: numbers, or arrays with an entry per row.

    Attributes:
        seq_len: Tokens of a sample.
        document_len: Tokens that see each other: seq_len, or less where documents are packed into a sample.
        attention_width, kv_width, value_width: Of the queries, of the keys, and of what attention puts out.
        ffn, gated: Of the dense feed-forward. `dense`: the share of the blocks that have it.
        experts, active, expert_ffn, shared_ffn: Of a block with experts: how many there are, how many work on a token,
            their width, and that of those that work on all. Zero experts: none.
        capacity: Rows of an expert's product over an equal share of the tokens.
        query_rank, kv_rank, rope_dim: Of latent attention; kv_rank of 0: plain attention.
        apart: Queries, keys, values are products of their own, and gate and up too.
        width: Bytes of an element that products read and write.
        plain_attention: Scores are written to memory.
        selective: Checkpointing per operation.
        fp8: Products of the blocks run in 8 bits.
        trained: Share of the parameters that has gradients of its own.
        widened: Bytes read and written where a block's quantised weights are widened for its products; 0: none are.
    """

    seq_len: Number
    document_len: Number
    hidden: Number
    heads: Number
    attention_width: Number
    kv_width: Number
    value_width: Number
    ffn: Number
    gated: bool | Bools
    vocab: Number
    dense: Number = 1.0
    experts: Number = 0.0
    active: Number = 0.0
    expert_ffn: Number = 0.0
    shared_ffn: Number = 0.0
    capacity: Number = 1.0
    query_rank: Number = 0.0
    kv_rank: Number = 0.0
    rope_dim: Number = 0.0
    apart: bool | Bools = False
    width: Number = 2.0
    plain_attention: bool | Bools = False
    selective: bool | Bools = False
    fp8: bool | Bools = False
    trained: Number = 1.0
    widened: Number = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A layer's product: `count` of rows x k by k x n, `batch` of them at once where experts have it."""

    name: str
    count: Number
    n: Number
    k: Number
    split: TensorSplit = "none"
    batch: Number = 1.0
    rows: Number = 1.0
    of_experts: bool = False


def block_products(d: Shape) -> list[Product]:
    """The products of one block, forward; `rows` as a share of the tokens."""
    h, latent, apart = d.hidden, np.asarray(d.kv_rank) > 0, np.asarray(d.apart)
    plain, gates = ~latent * 1.0, np.where(d.gated, 2.0, 1.0)
    experts = np.maximum(d.experts, 1.0)
    ffn, sparse = np.asarray(d.dense), 1.0 - np.asarray(d.dense)
    queried = np.where(np.asarray(d.query_rank) > 0, d.query_rank, h)
    heads_out = d.attention_width - d.heads * d.rope_dim + d.value_width
    rows = d.active / experts * d.capacity
    up: dict[str, Any] = {"k": h, "split": "n"}
    found = [
        Product(name="queries, keys, values", count=plain * ~apart, n=d.attention_width + 2 * d.kv_width, **up),
        Product(name="queries", count=plain * apart, n=d.attention_width, **up),
        Product(name="keys, values", count=2 * plain * apart, n=d.kv_width, **up),
        Product(name="queries down", count=latent * (np.asarray(d.query_rank) > 0), n=d.query_rank, k=h),
        Product(name="queries up", count=latent * 1.0, n=d.attention_width, k=queried, split="n"),
        Product(name="keys, values down", count=latent * 1.0, n=d.kv_rank + d.rope_dim, k=h),
        Product(name="keys, values up", count=latent * 1.0, n=heads_out, k=d.kv_rank, split="n"),
        Product(name="output", count=1.0, n=h, k=d.value_width, split="k"),
        Product(name="up", count=ffn * np.where(apart, gates, 1.0), n=d.ffn * np.where(apart, 1.0, gates), **up),
        Product(name="down", count=ffn, n=h, k=d.ffn, split="k"),
        Product(name="router", count=sparse, n=d.experts, k=h),
    ]
    if np.any(sparse):
        many: dict[str, Any] = {"batch": d.experts, "rows": rows, "of_experts": True, "count": sparse}
        found += [
            Product(name="experts up", n=d.expert_ffn * gates, **up, **many),
            Product(name="experts down", n=h, k=d.expert_ffn, split="k", **many),
        ]
        shared = sparse * (np.asarray(d.shared_ffn) > 0)
        found += [
            Product(name="shared up", count=shared * np.where(apart, gates, 1.0),
                    n=d.shared_ffn * np.where(apart, 1.0, gates), **up),
            Product(name="shared down", count=shared, n=h, k=d.shared_ffn, split="k"),
        ]  # fmt: skip
    return [product for product in found if np.any(product.count)]


def transformer_groups(d: Shape) -> list[OperationGroup]:
    """The operations of a micro-step without checkpointing, per block and outside of the blocks.

    Those of a selective policy that run again are among them, by rows, named `again: ...`.
    """
    products = block_products(d)
    groups = [group for product in products for group in _product_groups(d, product, "block")]
    groups += _attention_groups(d)
    launched = sum((np.asarray(p.count) for p in products), np.asarray(0.0)) + 1.0
    passes = BLOCK_PASSES + np.where(d.fp8, FP8_PASSES, 0.0)
    outer = 2.0 * d.seq_len * passes * d.hidden
    gates = np.where(d.gated, 2.0, 1.0)
    activated = d.dense * d.ffn + (1.0 - np.asarray(d.dense)) * (d.active * d.capacity * d.expert_ffn + d.shared_ffn)
    inner = 2.0 * d.seq_len * ACTIVATION_PASSES * gates * activated
    scores = 2.0 * SCORE_PASSES * d.heads * d.seq_len * d.document_len * np.where(d.plain_attention, 1.0, 0.0)
    again = np.where(d.selective, PASSES_AGAIN, 0.0)
    few = np.maximum(BLOCK_LAUNCHES - launched, 1.0) / 3
    many = np.maximum(LAUNCH_BACKWARD * BLOCK_LAUNCHES - 2 * launched + 1.0, 1.0) / 3
    for name, moved, split in (("norms, residuals", outer, "all"), ("activation", inner, "n"), ("scores", scores, "n")):
        groups.append(_memory(name, "forward", few, moved / few, split))
        groups.append(_memory(name, "backward", many, MEMORY_BACKWARD * moved / many, split))
        if np.any(again):
            groups.append(_memory(AGAIN + name, "backward", again * few, moved / few, split))
    if np.any(d.widened):
        for phase in ("forward", "backward"):
            widened = _memory("widened weights", phase, 4.0, 0.0, "n")
            groups.append(widened.model_copy(update={"bytes_moved": line(np.asarray(d.widened) / 4)}))
    return groups + _head_groups(d)


def checkpointed_groups(groups: list[OperationGroup]) -> list[OperationGroup]:
    """The same with every block checkpointed: the blocks' forward runs once more."""
    again = [
        group.model_copy(update={"phase": "backward", "name": AGAIN + group.name})
        for group in groups
        if group.segment == "block" and group.phase == "forward"
    ]
    return [group for group in groups if not group.name.startswith(AGAIN)] + again


def _product_groups(d: Shape, p: Product, segment: Literal["block", "rest"]) -> Iterator[OperationGroup]:
    """A layer's product, that of its input's gradient and that of its weight's, as (out x in)."""
    tokens = d.seq_len * p.rows
    turned: dict[str, TensorSplit] = {"n": "k", "k": "n"}
    into: dict[str, TensorSplit] = {"n": "m", "k": "n"}
    yield _product(p, segment, "forward", p.count, (None, p.n, p.k), tokens, p.split)
    yield _product(p, segment, "backward", p.count, (None, p.k, p.n), tokens, turned.get(p.split, "none"))
    if np.any(d.trained):
        yield _product(p, segment, "backward", p.count * d.trained, (p.n, p.k, None), tokens, into.get(p.split, "none"))


def _product(
    p: Product, segment: str, phase: str, count: Number, sizes: tuple[Any, Any, Any], tokens: Number, split: TensorSplit
) -> OperationGroup:
    """One of a layer's products; the size that is None grows with the samples."""
    fits = [line(per_sample=tokens) if size is None else line(size) for size in sizes]
    return OperationGroup.model_construct(
        name=p.name,
        kind="matmul",
        segment=segment,
        phase=phase,
        dtype="bfloat16",
        count=count,
        flops=line(per_sample=2.0 * tokens * p.n * p.k * p.batch),
        m=fits[0],
        n=fits[1],
        k=fits[2],
        batch=line(p.batch),
        tensor_split=split,
        of_experts=p.of_experts,
    )


def _attention_groups(d: Shape) -> list[OperationGroup]:
    """Attention, fused or as two products of each head."""
    plain = np.asarray(d.plain_attention)
    t, seen = d.seq_len, d.document_len
    flops = 2.0 * t * seen * (d.attention_width + d.value_width)
    fused = ~plain * 1.0
    phases = [("attention", "forward", fused, 1.0), ("attention", "backward", fused, FUSED_BACKWARD)]
    phases += [(AGAIN + "attention", "backward", fused * np.asarray(d.selective), 1.0)]
    phases += [("plain attention", "forward", plain * 1.0, 1.0), ("plain attention", "backward", plain * 1.0, 2.0)]
    phases += [(AGAIN + "plain attention", "backward", plain & np.asarray(d.selective), 1.0)]
    return [
        OperationGroup.model_construct(
            name=name,
            kind="attention",
            segment="block",
            phase=phase,
            dtype="plain" if "plain" in name else "bfloat16",
            count=count * 1.0,
            flops=line(per_sample=factor * flops),
            tensor_split="batch",
        )
        for name, phase, count, factor in phases
        if np.any(count)
    ]


def _head_groups(d: Shape) -> list[OperationGroup]:
    """Embedding, output head and loss."""
    head = Product(name="output head", count=1.0, n=d.vocab, k=d.hidden, split="n")
    groups = list(_product_groups(d, head, "rest"))
    moved = d.seq_len * LOGIT_BYTES * d.vocab
    groups.append(_memory("loss", "forward", HEAD_LAUNCHES, moved / HEAD_LAUNCHES, "n", "rest"))
    groups.append(_memory("embedding", "forward", 1.0, d.seq_len * HEAD_BYTES * d.hidden, "none", "rest"))
    return groups


def _memory(
    name: str, phase: str, count: Number, moved: Number, split: str, segment: Literal["block", "rest"] = "block"
) -> OperationGroup:
    return OperationGroup.model_construct(
        name=name,
        kind="memory",
        segment=segment,
        phase=phase,
        dtype="float32",
        count=count,
        bytes_moved=line(per_sample=moved),
        tensor_split=split,
    )


def line(fixed: Number = 0.0, per_sample: Number = 0.0) -> LinearFit:
    """A fit of numbers, or of arrays with an entry per row."""
    return LinearFit.model_construct(fixed=fixed, per_sample=per_sample)


# What is kept for the backward.


def kept_bytes(d: Shape, tp: Number = 1.0, apart: Number = 1.0) -> Floats:
    """Bytes that one block keeps for its backward, of one sample, with the kernels of published trainers.

    A plain block in 16 bits keeps t h (34 + 5 a t / h) (arXiv 2205.05198, equations 1 to 6): norms 4, attention 11,
    feed-forward 19 (8 h + 4 f in general, here 3 h + 4 f), scores 5 a t. Fused attention and selective recomputation
    drop the scores. A gated feed-forward keeps gate, up, their product and the activation: 8 f in place of 4 f. Experts
    keep that of each token once for each expert that works on it, and its rows as they were sent and as they came back.
    Tensor parallelism divides all but the norms, residuals and dropout masks (10 h); sequence parallelism those too.

    Args:
        d: The block.
        tp: Ranks that share it.
        apart: Of them those that share what is not divided otherwise, by sequence parallelism.
    """
    scale = np.asarray(d.width) / 2
    each = np.where(d.gated, 8.0, 4.0)
    sparse, rows = 1.0 - np.asarray(d.dense), d.active * d.capacity
    f = each * (d.dense * d.ffn + sparse * (rows * d.expert_ffn + d.shared_ffn))
    latent = np.asarray(d.kv_rank) > 0
    keys = np.where(latent, d.attention_width + d.value_width + d.kv_rank + d.query_rank, 2.0 * d.kv_width)
    inner = (2.0 * (d.attention_width + keys) + 2.0 * d.value_width + f) * scale
    outer = (10.0 + sparse * 4.0 * rows) * d.hidden * scale
    dropped = ~np.asarray(d.plain_attention) | np.asarray(d.selective)
    scores = np.where(dropped, 0.0, 5.0 * d.heads * d.document_len * scale)
    return np.asarray(d.seq_len * (outer / apart + (inner + scores) / tp))


def loss_bytes(d: Shape, tp: Number, samples: Floats, fused: Any, chunked: Any) -> Floats:
    """Bytes of the loss head: full, logits in the width of products and in fp32, and their gradient; chunked, logits
    and their gradient in the width of products; fused, the logits of a chunk in all forms, and the gradient of the
    hidden states."""
    tokens = samples * d.seq_len
    logits = tokens * d.vocab / tp
    chunk = np.minimum(logits, FUSED_LOSS_ELEMENTS / np.asarray(tp))
    plain = np.where(chunked, 2 * np.asarray(d.width), 8.0 + np.asarray(d.width)) * logits
    if not np.any(fused):
        return np.asarray(plain)
    in_chunks = (8.0 + d.width) * chunk + d.width * tokens * d.hidden
    return np.asarray(np.where(fused, np.minimum(in_chunks, plain), plain))


def transformer_variant(groups: list[OperationGroup], peaks: tuple[PeakFit, ...]) -> VariantProfile:
    """The groups as a variant."""
    return VariantProfile.model_construct(
        key=PLAIN, groups=tuple(groups), kernels=0.0, peaks=peaks, block_saved_bytes=ZERO, rest_saved_bytes=ZERO
    )
