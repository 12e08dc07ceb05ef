"""How a model is set while it trains: modules in training mode, no key-value cache, no checkpointing of its own.

In: the user's model, as it was built. Out: the same model in training mode, and contexts for each forward and backward
that turn the cache and the model's own checkpointing off, and put the user's settings back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def enter_training_mode(model: nn.Module) -> str | None:
    """Sets a model to training mode, and leaves alone what the user set to evaluation mode inside it.

    A module that is built is in training mode. So a root in training mode with parts in evaluation mode is what the
    user chose (a frozen backbone, frozen BatchNorm), and it stays. A root in evaluation mode is what
    `from_pretrained` returns, and says nothing about the parts: then everything trains, as after `model.train()`.

    Args:
        model: The model; changed in place.

    Returns:
        A sentence where the whole model had to be switched, else None.
    """
    if model.training:
        return None
    model.train()
    return "the model was in evaluation mode as a whole, so all of it was set to training mode"


def caching_configs(model: nn.Module) -> list[Any]:
    """Every configuration object inside a model that has a `use_cache`, once each.

    A model of transformers has one for all its parts, or some of its parts have copies (the decoder of a T5).
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        for part in (config, *_nested(config)):
            if hasattr(part, "use_cache"):
                found[id(part)] = part
    return list(found.values())


def _nested(config: Any) -> list[Any]:
    """The configurations that a configuration holds (text_config, vision_config, decoder)."""
    if not hasattr(config, "use_cache") and not hasattr(config, "sub_configs"):
        return []
    return [value for value in vars(config).values() if hasattr(value, "use_cache")]


@contextlib.contextmanager
def without_cache(configs: list[Any]) -> Iterator[None]:
    """Turns the key-value cache off for a forward and its backward, and puts the settings back.

    Training never reads a cache, but a model that is asked to keep one fills it during the forward. A recomputation
    in the backward would then append to it, and get other shapes than the forward had. So checkpointing needs this.
    A run without checkpointing leaves the settings alone: transformers looks for packed sequences only where there is
    no cache, so for batches with position ids that start anew the cache decides what a token attends to. There,
    parity refuses every checkpointing.
    """
    before = [config.use_cache for config in configs]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value


CHECKPOINTING_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Flags that modules of transformers and diffusers, and of timm, read in their forward: recompute in the backward?"""


def own_checkpointing(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that recompute by a flag of their own, each with the flag's name.

    `gradient_checkpointing_enable()` of a transformers model sets them. What calls torch.utils.checkpoint in its own
    forward without such a flag is not found: it is the model's program.
    """
    return [
        (module, flag)
        for module in model.modules()
        for flag in CHECKPOINTING_FLAGS
        if vars(module).get(flag, vars(type(module)).get(flag)) is True
    ]


@contextlib.contextmanager
def without_own_checkpointing(flagged: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Turns the model's own checkpointing off for a forward and its backward, and puts the flags back.

    The knob `checkpointing` decides what is recomputed. With both, each block would be recomputed twice.
    """
    for module, flag in flagged:
        setattr(module, flag, False)
    try:
        yield
    finally:
        for module, flag in flagged:
            setattr(module, flag, True)
