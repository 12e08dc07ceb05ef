"""Transformers by their dimensions: parameters, and the dimensions of the known families read from their config.json.

Nothing is traced and no torch is loaded: this is what `autoplan estimate` estimates clusters with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import Field

from autoplan.errors import WorkloadError
from autoplan.planner.cost.operations import Shape
from autoplan.record import Record
from autoplan.strategies.workloads.function_file import NAMED


class Transformer(Record):
    """The dimensions of a decoder-only (or encoder-only) transformer."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=1)
    vocab: int = Field(ge=1)
    gated_mlp: bool = False
    tied_embeddings: bool = True
    head_dim: int | None = None
    positions: int = Field(default=0, description="learned position embeddings; 0: none (rotary, ALiBi)")
    max_length: int | None = Field(default=None, description="the model's own sequence length")

    products_apart: bool = Field(default=False, description="queries, keys, values, gate, up are products of their own")
    experts: int = Field(default=0, ge=0, description="of a block; 0: none")
    active_experts: int = Field(default=0, ge=0, description="that work on one token")
    expert_ffn: int = Field(default=0, ge=0, description="width of one expert")
    shared_ffn: int = Field(default=0, ge=0, description="width of the experts that work on every token")
    dense_layers: int = Field(default=0, ge=0, description="of a model with experts, the layers without")
    query_rank: int = Field(default=0, ge=0, description="of latent attention (MLA); 0: queries are one product")
    kv_rank: int = Field(default=0, ge=0, description="of latent attention; 0: plain attention")
    rope_dim: int = Field(default=0, ge=0, description="of a head of latent attention, its rotary part")
    value_dim: int | None = Field(default=None, description="of a head; None: head_dim")

    @property
    def attention_width(self) -> int:
        """Width of the queries: heads x head_dim."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def value_width(self) -> int:
        """Width of what attention puts out."""
        return self.attention_width if self.value_dim is None else self.heads * self.value_dim

    @property
    def dense_share(self) -> float:
        """Share of the blocks without experts."""
        return self.dense_layers / self.layers if self.experts else 1.0

    @property
    def _attention_parameters(self) -> int:
        h, a = self.hidden, self.attention_width
        if not self.kv_rank:
            return h * (a + self.value_width + 2 * self.kv_width)
        queries = self.query_rank * (1 + h + a) if self.query_rank else h * a  # each rank has a norm
        keys = h * (self.kv_rank + self.rope_dim) + self.kv_rank
        values = self.kv_rank * (a - self.heads * self.rope_dim + self.value_width)
        return queries + keys + values + self.value_width * h

    @property
    def expert_parameters(self) -> float:
        """Weights of the experts of one block, of the mean block."""
        return (1 - self.dense_share) * self.experts * (3 if self.gated_mlp else 2) * self.hidden * self.expert_ffn

    @property
    def block_parameters(self) -> float:
        """Weights of one block, of the mean one where blocks differ: attention, feed-forward or experts, two norms;
        biases of the plain form are left out (0.1 %)."""
        once = (3 if self.gated_mlp else 2) * self.hidden
        dense, sparse = self.dense_share * self.ffn, (1 - self.dense_share) * self.shared_ffn
        router = (1 - self.dense_share) * self.experts * self.hidden
        return self._attention_parameters + once * (dense + sparse) + self.expert_parameters + router + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embeddings and, where it is not tied, the output head."""
        return (1 if self.tied_embeddings else 2) * self.vocab * self.hidden + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return round(self.layers * self.block_parameters) + self.embedding_parameters + self.hidden

    def shape(self, seq_len: int, **more: Any) -> Shape:
        """The sizes that its operations follow from; `more`: what Shape has besides."""
        return Shape(
            seq_len=float(seq_len),
            hidden=float(self.hidden),
            heads=float(self.heads),
            attention_width=float(self.attention_width),
            kv_width=float(self.kv_width),
            value_width=float(self.value_width),
            ffn=float(self.ffn),
            gated=self.gated_mlp,
            vocab=float(self.vocab),
            dense=self.dense_share,
            experts=float(self.experts),
            active=float(self.active_experts),
            expert_ffn=float(self.expert_ffn),
            shared_ffn=float(self.shared_ffn),
            query_rank=float(self.query_rank),
            kv_rank=float(self.kv_rank),
            rope_dim=float(self.rope_dim),
            apart=self.products_apart,
            **{"document_len": float(seq_len), **more},
        )


def is_traced(name: str, fixed: Collection[str] = ()) -> bool:
    """Whether `--model NAME` is traced: a function, or a model of another family.

    One with experts is too, unless ranks are to share experts or sequences, of which only the closed form knows.

    Args:
        name: As the user gave it.
        fixed: The inputs that the user fixed.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        return NAMED.fullmatch(name) is not None
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return kind not in ("gpt2", "bert", *_GATED, *(_SPARSE if {"ep", "cp"} & set(fixed) else ()))


_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
_TIED = ("bert", "gemma", "gemma2")  # where a config does not say it
_SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def from_config(config: dict[str, Any], name: str) -> Transformer:
    """The dimensions in a Hugging Face config.json.

    Raises:
        WorkloadError: not a family whose closed form is known.
    """
    kind = str(config.get("model_type"))
    if kind == "gpt2":
        hidden = config.get("n_embd", 768)
        layers, heads = config.get("n_layer", 12), config.get("n_head", 12)
        length = config.get("n_positions", 1024)
        return Transformer(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            ffn=config.get("n_inner") or 4 * hidden,
            vocab=config.get("vocab_size", 50257),
            positions=length,
            max_length=length,
        )
    if kind == "bert" or kind in (*_GATED, *_SPARSE):
        heads = config["num_attention_heads"]
        sizes: dict[str, Any] = {"head_dim": config.get("head_dim")} | (_sparse(config) if kind in _SPARSE else {})
        return Transformer(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            gated_mlp=kind != "bert",
            tied_embeddings=bool(config.get("tie_word_embeddings", kind in _TIED)),
            positions=config.get("max_position_embeddings", 0) if kind == "bert" else 0,
            max_length=config.get("max_position_embeddings"),
            products_apart=kind not in ("bert", "phi3"),
            **sizes,
        )
    raise WorkloadError(
        f"{name} is of type {kind!r}, for which no closed form is known",
        hint=f"The closed form knows gpt2, bert, {', '.join((*_GATED, *_SPARSE))}. A config.json of any other is "
        "traced; or give the dimensions in a table: --rows.",
    )


def _sparse(config: dict[str, Any]) -> dict[str, Any]:
    """The fields for experts and latent attention, by the names that the families have for them."""
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or config["num_experts"]
    found = {"experts": experts, "active_experts": config["num_experts_per_tok"], "expert_ffn": ffn}
    found["shared_ffn"] = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * ffn
    found["dense_layers"] = config.get("first_k_dense_replace", 0)
    if config.get("kv_lora_rank"):
        rope = config["qk_rope_head_dim"]
        found |= {"kv_rank": config["kv_lora_rank"], "query_rank": config.get("q_lora_rank") or 0, "rope_dim": rope}
        found |= {"head_dim": config["qk_nope_head_dim"] + rope, "value_dim": config["v_head_dim"]}
    return found


@functools.cache
def find_transformer(name: str) -> Transformer:
    """A built-in model's dimensions, or those of a config.json.

    Raises:
        WorkloadError: no such model, or a family without a closed form.
    """
    from autoplan.strategies.workloads.registry import canonical_name, list_models, near_names, read_config

    known = canonical_name(name)
    if known is not None:
        return from_config(read_config(known), known)
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            return from_config(json.loads(path.read_text()), name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkloadError(
                f"{name} is no usable config.json: {type(error).__name__}: {error}",
                hint="It is the config.json of a Hugging Face model, with model_type and its dimensions.",
            ) from error
    near = near_names(name)
    raise WorkloadError(
        f"no model is called {name!r}",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"Built in are: {', '.join(list_models())}.",
    )
