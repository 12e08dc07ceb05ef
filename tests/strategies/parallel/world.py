"""Tiny workloads, and one checked step of them on several ranks against one plain process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.processes import ProcessReport, RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.techniques.mesh import gather_full, named_parameters
from autoplan.strategies.workloads.language_model import CausalHead, causal_loss, count_labels
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload

SEQUENCE = 16
GLOBAL_BATCH = 8
VOCABULARY = 67  # odd, as GPT-2's 50257 is


LLAMA_PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
"""A tensor-parallel plan of a user's own."""


def token_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Tokens that follow each other by a rule, with labels cut at a length that differs by sample."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(0, VOCABULARY, (num_samples, 1), generator=generator)
    ids = (start + 7 * torch.arange(SEQUENCE)) % VOCABULARY
    labels = ids.clone()
    for row in range(num_samples):
        labels[row, SEQUENCE - 2 * (row % 5) :] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


def build(kind: str, head: str, **sizes: Any) -> nn.Module:
    """A model of transformers with random weights."""
    import transformers

    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes))


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": 32, "n_layer": 4, "n_head": 4, **NO_DROPOUT}
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
DECODER = SIZES | {"vocab_size": VOCABULARY, "intermediate_size": 48, "max_position_embeddings": SEQUENCE}
GROUPED = DECODER | {"num_key_value_heads": 2}
TIED = {"head_dim": 8, "tie_word_embeddings": True}
IMAGE = SIZES | {"intermediate_size": 64, "image_size": 16, "patch_size": 8, "num_labels": 5}
build_gpt2 = functools.partial(build, "GPT2", "LMHeadModel", **GPT2)


def build_gemma3() -> nn.Module:
    """Its embedding multiplies what it finds, and asks super() for it."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": build_gpt2,
    "llama": functools.partial(build, "Llama", "ForCausalLM", **GROUPED),
    "qwen3": functools.partial(build, "Qwen3", "ForCausalLM", **GROUPED, **TIED),
    "gemma3": build_gemma3,
    # its forward asks the patch embedding for the type of its weights
    "vit": functools.partial(
        build, "ViT", "ForImageClassification", **IMAGE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
}


def build_frozen_gpt2() -> nn.Module:
    """The tied embedding, the positions and the first block do not train."""
    model: Any = build_gpt2()
    for module in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        module.requires_grad_(False)
    return model


def build_asking_gpt2() -> nn.Module:
    """Its forward asks each block for its kind before it calls any, as ModernBERT does for the masks."""
    model: Any = build_gpt2()
    for number, block in enumerate(model.transformer.h):
        block.kind = number % 2
    model.transformer.register_forward_pre_hook(_ask_blocks)
    return model


def _ask_blocks(module: Any, args: Any) -> None:
    assert {block.kind for block in module.h} == {0, 1}


def image_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Images, each with one of five labels."""
    generator = torch.Generator().manual_seed(index)
    pixels = torch.randn(num_samples, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (num_samples,), generator=generator)}


def image_loss(model: nn.Module, batch: Any) -> LossSum:
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    return LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"]))


IMAGES: dict[str, Any] = {
    **{"make_batch": image_batch, "loss": image_loss},
    **{"count": None, "head": None, "sequence_length": None},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Changes of parameters are then as large as their gradients; Adam's first step is nearly a sign."""
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_workload(model: str, **options: Any) -> Workload:
    fields: dict[str, Any] = {
        "name": model,
        "build_model": MODELS[model],
        "make_batch": token_batch,
        "loss": causal_loss,
        "build_optimizer": sgd,
        "global_batch": GLOBAL_BATCH,
        "sequence_length": SEQUENCE,
        "max_grad_norm": 0.5,
        "count": functools.partial(count_labels, shifted=True),
        "head": CausalHead(),
        "seed": 3,
    }
    return Workload(**(fields | (IMAGES if model == "vit" else {}) | options))


def go_on(run: TrainingRun, steps: Sequence[int], load: str = "", save: str = "") -> None:
    """Steps of a run, from a checkpoint where one is named; its state is saved where a place is named."""
    import torch.distributed.checkpoint as dcp

    if load:
        state = run.state_dict()
        dcp.load(state, checkpoint_id=load)
        run.load_state_dict(state)
    for index in steps:
        run.step(run.local_share(run.workload.make_batch(run.workload.global_batch, index)))
    if save:
        dcp.save(run.state_dict(), checkpoint_id=save)


Plant = Callable[[TrainingRun | None], None]


def fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters below a module; they are torch's own affair, and torch 2.11 has one for each."""
    states = [one._get_fsdp_state() for one in module.modules() if hasattr(one, "_get_fsdp_state")]
    several = [getattr(state, "_fsdp_param_groups", None) for state in states]
    if None in several:
        return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    return [group for groups in several for group in groups]


def each_in_turn(context: RankContext, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Runs in each rank: a function for each of some arguments, one after another: the ranks start once for all."""
    if context.world_size > 1:
        context.init_process_group("gloo", 60.0)
    return [function(context, *job) for job in jobs]


def take_step(
    context: RankContext, model: str, config: TrainingConfig, out: str, plant: Plant | None, options: dict[str, Any]
) -> dict[str, Any]:
    """One step, whose whole gradients (before clipping) and changes rank 0 writes to `out`.

    `plant` puts a bug in: it is called with None before the run is built, and with the run after.
    """
    workload = make_workload(model, **options)
    if plant is not None:
        plant(None)
    run = prepare(workload, config, device="cpu")
    if plant is not None:
        plant(run)
    before = gather_full(dict(named_parameters(run.model)), run.mesh)
    batch = run.local_share(workload.make_batch(workload.global_batch, 0))
    gradients: dict[str, torch.Tensor] = {}

    def observe() -> None:
        held = {name: value.grad for name, value in named_parameters(run.model) if value.grad is not None}
        gradients.update(gather_full(held, run.mesh))

    run.observe_gradients(observe)
    result = run.optimizer_step(*run.forward_backward(batch))
    after = gather_full(dict(named_parameters(run.model)), run.mesh)
    if context.rank == 0:
        changes = {name: after[name] - before[name] for name in before}
        torch.save({"gradients": gradients, "changes": changes}, out)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for _, p in named_parameters(run.model))
    return {"loss": float(result.loss), "norm": float(result.grad_norm or 0.0), "elements": held}


def run_step(
    zygote: Zygote,
    model: str,
    config: TrainingConfig,
    directory: Path,
    *,
    plant: Plant | None = None,
    deadline_s: float = 120.0,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """One step in ranks of its own: rank 0's result, and the tensors that it wrote."""
    out = directory / f"{time.monotonic_ns()}.pt"
    job = (model, config, str(out), plant, options)
    report = run_ranks(zygote, each_in_turn, config.world_size, (take_step, [job]), deadline_s)
    return report.ranks[0].result[0], torch.load(out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One step of one configuration.

    Attributes:
        model: One of MODELS.
        config: What is stepped.
        plant: As `take_step` takes it.
        alone: In ranks of its own: its plant changes more than its run, or the step fails.
        options: Of the workload.
    """

    model: str
    config: TrainingConfig
    plant: Plant | None = None
    alone: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Steps:
    """Steps of many cases; those of as many ranks are made in the same processes, which start once.

    Args:
        zygote: Forks the ranks.
        folder: For what they write.
        cases: Those that will be asked for.
    """

    def __init__(self, zygote: Zygote, folder: Path, cases: Sequence[Case]) -> None:
        self._zygote, self._folder, self._cases = zygote, folder, cases
        self._made: dict[Case, tuple[dict[str, Any], Path]] = {}

    def of(self, case: Case) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        """Rank 0's result, and the tensors that it wrote, as of `run_step`."""
        if case.alone:
            return run_step(
                self._zygote, case.model, case.config, self._folder, plant=case.plant, deadline_s=240.0, **case.options
            )
        if case not in self._made:
            ranks = case.config.world_size
            known = case in self._cases
            alike = [one for one in self._cases if one.config.world_size == ranks and not one.alone]
            self._make(alike if known else [case], ranks)
        result, path = self._made[case]
        return result, torch.load(path)

    def _make(self, cases: Sequence[Case], ranks: int) -> None:
        folder = self._folder / str(time.monotonic_ns())
        folder.mkdir()
        jobs = [
            (case.model, case.config, str(folder / f"{number}.pt"), case.plant, case.options)
            for number, case in enumerate(cases)
        ]
        report = run_ranks(self._zygote, each_in_turn, ranks, (take_step, jobs), 300.0)
        for case, job, result in zip(cases, jobs, report.ranks[0].result, strict=True):
            self._made[case] = result, Path(job[2])


def run_ranks(
    zygote: Zygote, target: Callable[..., Any], ranks: int, args: tuple[Any, ...], deadline_s: float = 120.0
) -> ProcessReport:
    """Runs a function in ranks that have to succeed."""
    report = zygote.run(
        Task(target=target, args=args, ranks=ranks, deadlines_s={"*": deadline_s}, env={"OMP_NUM_THREADS": "1"})
    )
    failure = report.first_failure
    assert failure is None and report.ended == "finished", (
        report.ended,
        None if failure is None else (failure.error and failure.error.traceback or failure.stderr_tail),
    )
    return report


def differences(
    reference: dict[str, dict[str, torch.Tensor]], candidate: dict[str, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """The largest relative difference over the parameters: of norms, and of the tensors themselves."""
    worst: dict[str, float] = {}
    for kind in ("gradients", "changes"):
        assert reference[kind].keys() == candidate[kind].keys(), reference[kind].keys() ^ candidate[kind].keys()
        scale = max(float(tensor.norm()) for tensor in reference[kind].values())
        norms, tensors = [], []
        for name, expected in reference[kind].items():
            size = max(float(expected.norm()), 1e-4 * scale)
            norms.append(abs(float(candidate[kind][name].norm()) - float(expected.norm())) / size)
            tensors.append(float((candidate[kind][name] - expected).norm()) / size)
        worst[f"{kind}_norm"] = max(norms)
        worst[kind] = max(tensors)
    return worst
