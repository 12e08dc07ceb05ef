"""Transformers by their dimensions: parameters, and the dimensions of the known families read from their config.json.

Nothing is traced and no torch is loaded: this is what `autoplan estimate` estimates clusters with.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pydantic import Field

from autoplan.errors import WorkloadError
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

    @property
    def attention_width(self) -> int:
        """Width of the queries: heads x head_dim."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def block_parameters(self) -> int:
        """Weights of one block: attention, feed-forward, two norms; biases of the plain form are left out (0.1 %)."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        return attention + (3 if self.gated_mlp else 2) * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embeddings and, where it is not tied, the output head."""
        return (1 if self.tied_embeddings else 2) * self.vocab * self.hidden + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.block_parameters + self.embedding_parameters + self.hidden


def is_traced(name: str) -> bool:
    """Whether `--model NAME` has no closed form and is traced: a function, or a model of another family."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        return NAMED.fullmatch(name) is not None
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return kind not in ("gpt2", "bert", *_GATED)


_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")


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
    if kind == "bert" or kind in _GATED:
        heads = config["num_attention_heads"]
        return Transformer(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            gated_mlp=kind in _GATED,
            tied_embeddings=bool(config.get("tie_word_embeddings", kind == "bert")),
            head_dim=config.get("head_dim"),
            positions=config.get("max_position_embeddings", 0) if kind == "bert" else 0,
            max_length=config.get("max_position_embeddings"),
        )
    raise WorkloadError(
        f"{name} is of type {kind!r}, for which no closed form is known",
        hint=f"The closed form knows gpt2, bert, {', '.join(_GATED)}. A config.json of any other is traced; or give "
        "the dimensions in a table: --rows.",
    )


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
