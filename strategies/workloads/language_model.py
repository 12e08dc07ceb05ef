"""The workload of a language model of transformers: random weights from a configuration, or weights from a folder.

Causal (decoder-only), masked (BERT) and encoder-decoder (T5) models. Batches are random tokens at full length, with
frequencies that fall off as in text, so that there is something to learn. The loss is what transformers computes:
cross-entropy over fp32 logits, of labels shifted by one for causal models; here as a sum and a count.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.registry import DEFAULT_OPTIONS
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload

Task = Literal["causal", "masked", "seq2seq"]

_MASKED_TYPES = ("bert", "roberta", "distilbert", "deberta", "deberta-v2", "electra", "albert", "modernbert")
_MASKED_SHARE = 0.15  # of the tokens, Devlin et al. 2019, section 3.1
_TARGET_SHARE = 114 / 512  # target over input length of T5's span corruption, Raffel et al. 2020, section 3.1.4
_SCALED_LOGITS = (
    "logit_scale",
    "logits_scaling",
    "final_logit_softcapping",
    "output_multiplier_scale",
    "lm_head_multiplier",
)


def task_of(fields: Mapping[str, Any]) -> Task:
    """Which training task a configuration is for, from its architecture and type."""
    architectures = " ".join(fields.get("architectures") or ())
    if fields.get("is_encoder_decoder") or "ConditionalGeneration" in architectures:
        return "seq2seq"
    if "MaskedLM" in architectures or fields.get("model_type") in _MASKED_TYPES:
        return "masked"
    return "causal"


def language_model_workload(
    fields: Mapping[str, Any],
    *,
    name: str,
    sequence_length: int,
    global_batch: int,
    options: Mapping[str, Any],
    weights: Path | None = None,
) -> Workload:
    """The workload of a transformers configuration.

    Args:
        fields: The configuration, as config.json has it.
        name: For screens and plans.
        sequence_length: Tokens per sequence.
        global_batch: Sequences per optimizer step.
        options: See DEFAULT_OPTIONS; also fixed_micro_batch.
        weights: A local folder with weights; None: random ones.

    Raises:
        WorkloadError: transformers does not know the model type, or the fields do not make a model.
    """
    config = make_config(fields)
    task = task_of(fields)
    chosen = DEFAULT_OPTIONS | {key: value for key, value in options.items() if key != "fixed_micro_batch"}
    seed = int(chosen["seed"])
    make_optimizer = functools.partial(
        torch.optim.AdamW, lr=float(chosen["learning_rate"]), weight_decay=float(chosen["weight_decay"])
    )
    vocabulary, padding = int(config.get_text_config().vocab_size), padding_token(config)
    return Workload(
        name=name,
        build_model=functools.partial(_build, config, task, weights),
        make_batch=functools.partial(_random_batch, task, vocabulary, padding, sequence_length, seed),
        loss=LANGUAGE_MODEL_LOSSES[task],
        build_optimizer=make_optimizer,
        global_batch=global_batch,
        sequence_length=sequence_length,
        max_grad_norm=None if chosen["max_grad_norm"] is None else float(chosen["max_grad_norm"]),
        count=functools.partial(count_labels, shifted=task == "causal"),
        head=CausalHead() if task == "causal" else None,
        load_weights=None if weights is None else functools.partial(_load_weights, weights, task),
        fixed_micro_batch=None if options.get("fixed_micro_batch") is None else int(options["fixed_micro_batch"]),
        seed=seed,
    )


def make_config(fields: Mapping[str, Any]) -> Any:
    """A transformers configuration object from its fields.

    Raises:
        WorkloadError: an unknown model type, or fields that transformers refuses.
    """
    from transformers import AutoConfig

    rest = {key: value for key, value in fields.items() if key not in ("model_type", "torch_dtype", "dtype")}
    try:
        config = AutoConfig.for_model(fields["model_type"], **rest)
        config.use_cache = False
    except (KeyError, ValueError) as error:
        known = "Unrecognized model identifier" in str(error)
        raise WorkloadError(
            f"transformers does not know the model type {fields.get('model_type')!r}"
            if known
            else f"transformers refuses this configuration: {error}",
            hint="Check model_type in the config.json, or update transformers.",
        ) from error
    except Exception as error:
        raise WorkloadError(
            f"transformers refuses this configuration: {type(error).__name__}: {error}",
            hint="Check the fields of the config.json against those of a published model of the same type.",
        ) from error
    return config


def _auto_class(task: Task) -> Any:
    import transformers

    names = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
    return getattr(transformers, names[task])


def _build(config: Any, task: Task, weights: Path | None) -> nn.Module:
    auto = _auto_class(task)
    try:
        if weights is None or torch.get_default_device().type == "meta":
            return auto.from_config(copy.deepcopy(config), dtype=torch.float32)
        return auto.from_pretrained(weights, config=config, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        raise WorkloadError(
            f"the model cannot be made from its configuration: {type(error).__name__}: {error}",
            hint="Check the config.json (and that the weights in its folder belong to it).",
        ) from error


def _load_weights(weights: Path, task: Task, model: nn.Module) -> None:
    loaded = _auto_class(task).from_pretrained(weights, dtype=torch.float32, local_files_only=True)
    model.load_state_dict(loaded.state_dict())


def padding_token(config: Any) -> int | None:
    """The number of the padding token in a model's vocabulary; None if it has none.

    Batches have none of it: its embedding is often zero and stays so, and a sequence that begins with it is zero in
    every block of a model without biases (Gemma 3), where the gradients of the norms grow past any number.
    """
    config = config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    return padding if isinstance(padding, int) and 0 <= padding < config.vocab_size and config.vocab_size > 1 else None


def _random_batch(
    task: Task, vocabulary: int, padding: int | None, length: int, seed: int, num_samples: int, index: int
) -> Batch:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    tokens = _tokens(generator, vocabulary, num_samples, length, padding)
    if task == "causal":
        return {"input_ids": tokens, "labels": tokens.clone()}
    if task == "seq2seq":
        return {
            "input_ids": tokens,
            "labels": _tokens(generator, vocabulary, num_samples, max(1, int(length * _TARGET_SHARE)), padding),
        }
    masked = torch.rand(tokens.shape, generator=generator) < _MASKED_SHARE
    masked[:, 0] = True
    labels = torch.where(masked, tokens, IGNORE_INDEX)
    return {"input_ids": torch.where(masked, vocabulary - 1, tokens), "labels": labels}


def _tokens(
    generator: torch.Generator, vocabulary: int, num_samples: int, length: int, padding: int | None
) -> torch.Tensor:
    uniform = torch.rand(num_samples, length, generator=generator)
    kinds = vocabulary if padding is None else vocabulary - 1
    tokens = (uniform.pow(3) * kinds).long().clamp_(max=kinds - 1)
    return tokens if padding is None else tokens + (tokens >= padding)


# The losses, also for a model that the user hands to plan.prepare().


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels moved by one, so that position n holds the token that n has to predict; (samples, sequence)."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def count_labels(batch: Batch, *, shifted: bool) -> int:
    """How many labels the loss counts."""
    labels = batch["labels"]
    return int(((labels[..., 1:] if shifted else labels) != IGNORE_INDEX).sum())


def causal_loss(model: nn.Module, batch: Batch) -> LossSum:
    """Cross-entropy of the next token, summed, over fp32 logits as transformers' ForCausalLMLoss has it."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs, use_cache=False)
    result = _cross_entropy(output.logits, shifted_labels(batch["labels"]))
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return result
    config: Any = model.config
    return LossSum(result.total + config.router_aux_loss_coef * auxiliary * result.count, result.count)


def masked_loss(model: nn.Module, batch: Batch) -> LossSum:
    """Cross-entropy of the masked tokens, summed."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return _cross_entropy(model(**inputs).logits.float(), batch["labels"])


def seq2seq_loss(model: nn.Module, batch: Batch) -> LossSum:
    """Cross-entropy of the target sequence, summed; decoder inputs are the labels moved by one."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    shift: Any = model.prepare_decoder_input_ids_from_labels
    output = model(**inputs, decoder_input_ids=shift(batch["labels"]), use_cache=False)
    return _cross_entropy(output.logits, batch["labels"])


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    total = F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), targets.view(-1), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return LossSum(total, (targets != IGNORE_INDEX).sum())


LANGUAGE_MODEL_LOSSES: dict[Task, Callable[[nn.Module, Batch], LossSum]] = {
    "causal": causal_loss,
    "masked": masked_loss,
    "seq2seq": seq2seq_loss,
}


class CausalHead:
    """How a causal model of transformers splits into hidden states and output head."""

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The last hidden state, after the final norm."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        base: Any = model.base_model
        return base(**inputs, use_cache=False).last_hidden_state

    def linear(self, model: nn.Module) -> nn.Module:
        """The output head."""
        get: Any = model.get_output_embeddings
        return get()

    def targets(self, batch: Batch) -> torch.Tensor:
        """The next token of each position."""
        return shifted_labels(batch["labels"])

    def reason_against(self, model: nn.Module) -> str | None:
        """Why the fused loss would not compute the same for this model; None if it does."""
        config: Any = getattr(model, "config", None)
        for name in _SCALED_LOGITS:
            if getattr(config, name, None) not in (None, 1, 1.0):
                return f"the model scales or caps its logits ({name}), which the fused operation does not"
        if getattr(config, "output_router_logits", False):
            return "the model adds an auxiliary loss of its own"
        head: Any = self.linear(model)
        if not isinstance(head, nn.Linear):
            return "the output head is not a linear layer"
        base: Any = getattr(model, "base_model", None)
        if base is None or any(module is head for module in base.modules()):
            return "the model has no base model without the output head (that of a PeftModel is the whole model)"
        return None
