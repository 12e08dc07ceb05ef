"""Rough profiles, for what a search has no time to trace. Loads no torch.

In: the variants that were traced, or only the facts of the workload. Out: variants with the right order of magnitude,
named in `ModelProfile.rough_variants`. They decide what is tried first, and the trials correct them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoplan.planner.trace.model_profile import (
    PLAIN,
    LinearFit,
    ModelProfile,
    OperationGroup,
    PeakFit,
    VariantKey,
    VariantProfile,
)
from autoplan.strategies.analysis.facts import WorkloadFacts

HALF_BYTES = 0.6
"""Share of the fp32 bytes that a 16-bit variant saves and moves: autocast keeps norms and losses in fp32. Assumed."""

CASTS = 2.0
"""Casts that autocast adds for each product or convolution of forward and backward, one launch each: traces of GPT-2,
two small transformers and two convolutional nets have 1.0 to 3.7, the median 2.3."""

SAVED_SHARE = {"none": 1.0, "selective": 0.6, "full": 0.1}
"""Share of a block's saved bytes under each checkpointing. A block of a transformer saves 34 s b h bytes in 16 bits,
its input alone is 2 s b h (Korthikanti et al. 2022, arXiv 2205.05198, table 2), and one block is whole while it is
recomputed. Selective: assumed, between what matrix products and all operations save."""

ACTIVATION_BYTES = 24.0
"""Bytes that a block saves per position and unit of its width, in fp32. A transformer's block saves some 17 values (34
bytes in 16 bits, the same table), that is 68 bytes; models that are not traced are rarely plain transformers, and a
third of it is assumed."""


def with_rough_variants(profile: ModelProfile, wanted: Iterable[VariantKey]) -> ModelProfile:
    """The profile with a rough variant for each wanted one that was neither traced nor failed."""
    variants = dict(profile.variants)
    rough = list(profile.rough_variants)
    for key in wanted:
        if key.text() not in variants and key.text() not in profile.failed_variants:
            variants[key.text()] = rough_variant(key, profile.variants, profile.num_blocks)
            rough.append(key.text())
    return profile.model_copy(update={"variants": variants, "rough_variants": tuple(rough)})


def only_rough(profile: ModelProfile, wanted: Iterable[VariantKey]) -> ModelProfile:
    """The profile without those rough variants that are not wanted: nothing is traced for what no space has."""
    names = {key.text() for key in wanted}
    left_out = {name for name in profile.rough_variants if name not in names}
    variants = {name: found for name, found in profile.variants.items() if name not in left_out}
    rough = tuple(name for name in profile.rough_variants if name not in left_out)
    return profile.model_copy(update={"variants": variants, "rough_variants": rough})


def rough_variant(key: VariantKey, traced: Mapping[str, VariantProfile], num_blocks: int) -> VariantProfile:
    """A variant from the nearest one that was traced: other number formats and other checkpointing are estimated.

    Args:
        key: The wanted variant.
        traced: The variants that were traced, the plain one among them.
        num_blocks: Blocks per stack; 0 where the variants do not tell blocks from the rest.
    """
    nearest = next(traced[near.text()] for near in _nearest(key) if near.text() in traced)
    bytes_share = HALF_BYTES if key.precision == "half" and nearest.key.precision == "fp32" else 1.0
    saved_share = SAVED_SHARE[key.checkpointing] / SAVED_SHARE[nearest.key.checkpointing]
    groups = list(nearest.groups)
    if bytes_share != 1.0:
        groups = [_in_half(group) for group in groups]
        groups += [_casts(group) for group in groups if group.kind in ("matmul", "convolution")]
    if key.checkpointing != "none" and nearest.key.checkpointing == "none":
        groups += [group.model_copy(update={"phase": "backward"}) for group in groups if _recomputes(group, key)]
    freed = (1.0 - saved_share) * bytes_share * (max(1, num_blocks) * nearest.block_saved_bytes)
    return VariantProfile(
        key=key,
        groups=tuple(groups),
        kernels=sum(group.count * (num_blocks if group.segment == "block" else 1) for group in groups),
        peaks=tuple(
            PeakFit(
                part=peak.part,
                first=_less(bytes_share * peak.first, freed),
                later=_less(bytes_share * peak.later, freed),
            )
            for peak in nearest.peaks
        ),
        block_saved_bytes=bytes_share * saved_share * nearest.block_saved_bytes,
        rest_saved_bytes=bytes_share * nearest.rest_saved_bytes,
    )


def _nearest(key: VariantKey) -> list[VariantKey]:
    """Variants that differ from one in fewer and fewer of the wanted knobs; the plain one comes last."""
    found = [key]
    changes: tuple[dict[str, str], ...] = (
        {"loss": "full"},
        {"attention": "own"},
        {"loss": "full", "attention": "own"},
        {"checkpointing": "none"},
        {"loss": "full", "attention": "own", "checkpointing": "none"},
        {"precision": "fp32", "loss": "full", "attention": "own"},
    )
    found += [key.model_copy(update=change) for change in changes]
    if key.parameters != "own":
        found += [near.model_copy(update={"parameters": "own"}) for near in found]
    return [*found, PLAIN]


def _in_half(group: OperationGroup) -> OperationGroup:
    matrix = group.kind in ("matmul", "attention", "convolution")
    return group.model_copy(
        update={
            "dtype": "bfloat16" if matrix else group.dtype,
            "bytes_moved": HALF_BYTES * group.bytes_moved,
            "output_bytes": HALF_BYTES * group.output_bytes,
            "measured_s": None,
            "measured_more_s": None,
        }
    )


def _casts(group: OperationGroup) -> OperationGroup:
    """The casts around a product, whose bytes are in its variant's share of bytes: a small model waits for launches."""
    count = CASTS * group.count
    return OperationGroup(
        name="cast", kind="memory", segment=group.segment, phase=group.phase, dtype="bfloat16", count=count
    )


def _recomputes(group: OperationGroup, key: VariantKey) -> bool:
    """Whether an operation of the forward runs again in the backward: all of a block's, or all but matrix products."""
    if group.phase != "forward" or group.segment != "block":
        return False
    return key.checkpointing == "full" or group.kind == "memory"


def _less(fit: LinearFit, freed: LinearFit) -> LinearFit:
    """A peak without what is freed, but a tenth of it at least."""
    return LinearFit(
        fixed=max(fit.fixed - freed.fixed, 0.1 * fit.fixed),
        per_sample=max(fit.per_sample - freed.per_sample, 0.1 * fit.per_sample),
    )


def rough_profile(facts: WorkloadFacts, device: str, why: str) -> ModelProfile:
    """A profile of a workload that could not be traced, from the sizes of its model alone.

    A sample position (a token, or the sample itself) costs 2 FLOPs per parameter forward and 4 backward (Kaplan et al.
    2020, arXiv 2001.08361, section 2.1), as products of square matrices, and saves activations in proportion to the
    width of the model.

    Args:
        facts: The workload's.
        device: cpu or cuda.
        why: Why it was not traced; kept as a note.
    """
    tokens = float(facts.spec.sequence_length or 1)
    parameters = float(max(1, facts.parameters - facts.embedding_parameters))
    blocks = max(1, facts.num_blocks)
    width = float(facts.hidden_size or max(1.0, (parameters / (12 * blocks)) ** 0.5))
    saved = LinearFit(per_sample=ACTIVATION_BYTES * tokens * width * blocks)
    logits = LinearFit(per_sample=8.0 * float(facts.logits_per_sample or 0))
    matrices = parameters / width**2
    shared = {"m": LinearFit(per_sample=tokens), "n": LinearFit(fixed=width), "k": LinearFit(fixed=width)}
    groups = []
    for phase, factor in (("forward", 1.0), ("backward", 2.0)):
        moved = LinearFit(fixed=4.0 * width**2, per_sample=8.0 * tokens * width)
        product = {"name": "mm", "kind": "matmul", "count": factor * matrices, "bytes_moved": moved, **shared}
        product["flops"] = LinearFit(per_sample=2.0 * tokens * width**2)
        passes = {"name": "elementwise", "kind": "memory", "count": 6.0 * factor * blocks}
        passes["bytes_moved"] = LinearFit(per_sample=8.0 * tokens * width)
        groups += [
            OperationGroup.model_validate({"segment": "rest", "phase": phase, "dtype": "float32"} | operation)
            for operation in (product, passes)
        ]
    kept = saved + logits
    gradients = LinearFit(fixed=4.0 * facts.trainable_parameters)
    plain = VariantProfile(
        key=PLAIN,
        groups=tuple(groups),
        kernels=sum(group.count for group in groups),
        peaks=(
            PeakFit(part="forward", first=kept, later=kept),
            PeakFit(part="backward", first=kept + gradients, later=kept),
        ),
        block_saved_bytes=saved,  # as where blocks that differ are traced as one (num_blocks is 0)
        rest_saved_bytes=kept,
    )
    return ModelProfile(
        identity=facts.spec.identity,
        method="rough",
        device=device,
        parameters=facts.parameters,
        trainable=facts.trainable_parameters,
        parameter_bytes=facts.parameter_bytes,
        block_parameters=(facts.parameters - facts.embedding_parameters) / blocks,
        largest_unit_parameters=float(max(facts.embedding_parameters, facts.parameters / blocks)),
        num_blocks=0,
        sequence_length=facts.spec.sequence_length,
        hidden=facts.hidden_size,
        optimizer_name=facts.optimizer,
        optimizer_form=None if facts.training is None else facts.training.step_form,
        optimizer_state_bytes_per_parameter=4.0 * facts.optimizer_states,
        tokens_per_sample=facts.spec.sequence_length or 1,
        variants={PLAIN.text(): plain},
        rough_variants=(PLAIN.text(),),
        notes=(why,),
    )


def step_profile(facts: WorkloadFacts, device: str) -> ModelProfile:
    """The profile of steps that are a program of their own: one operation, as long as a step took in the inspection.

    Nothing is known of what a step computes, so every configuration is predicted alike until trials correct it.

    Args:
        facts: The workload's, with `step_s`.
        device: cpu or cuda.
    """
    assert facts.step_s is not None, "only a step of its own was timed"
    whole = rough_profile(
        facts, device, "the step is not traced: predictions are those of one plain step, then of trials"
    )
    one = OperationGroup(
        name="the step",
        kind="memory",
        segment="rest",
        phase="forward",
        dtype="float32",
        count=1.0,
        bytes_moved=LinearFit(fixed=1.0),
        measured_s=facts.step_s,
        measured_samples=float(facts.spec.global_batch),
    )
    plain = whole.variants[PLAIN.text()].model_copy(update={"groups": (one,), "kernels": 1.0})
    keys = (PLAIN, PLAIN.model_copy(update={"precision": "half"}))
    variants = {key.text(): plain.model_copy(update={"key": key}) for key in keys}
    return whole.model_copy(update={"variants": variants, "rough_variants": ()})
