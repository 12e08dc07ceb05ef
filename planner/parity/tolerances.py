"""How far a candidate may be from the reference, by precision. Loads no torch.

Each figure is measured: tests/planner/parity/test_parity_variants.py runs about a hundred correct variants,
tests/planner/parity/test_parity_fp8.py those of fp8, and docs/parity.md has the largest difference of each kind beside
what passes.
"""

from __future__ import annotations

from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig


class Tolerance(Record):
    """The largest relative differences that pass.

    Attributes:
        norm: Of the norm of a parameter's gradient.
        vector: Of a parameter's gradient: ||g - g_ref|| / ||g_ref||.
        whole: The same of the whole gradient.
        floor: A parameter whose gradient is smaller than this share of the whole gradient is measured against that
            share: what is left of a gradient that cancels (a router's gate) is rounding.
        module_floor: The same share of the gradient of its module (a key's bias, beside its weight). The bias of a
            first convolution before a BatchNorm, on images of 0 to 1, was 4e-5 of its module's gradient off in fp32.
        scale: Of <g, g_ref> / <g_ref, g_ref> from 1, over the whole gradient and over each large parameter.
        parameter_scale: The same for one large parameter alone.
        later: The scale of the whole gradient in the second and the third step, when parameters differ.
        later_whole: Its distance from the second step on, and its scale from the fourth.
        loss: Of the loss.
        later_loss: Of the loss from the second step on.
        clipping: Of the norm before clipping and the share that clipping leaves.
        optimizer: Distance of a parameter from the replayed optimizer's, over its change.
    """

    norm: float
    vector: float
    whole: float
    later: float
    later_whole: float
    loss: float
    later_loss: float
    floor: float = 1e-3
    module_floor: float = 1e-1
    scale: float = 5e-3
    parameter_scale: float = 1e-2
    clipping: float = 1e-3
    optimizer: float = 2e-5


# tf32 has as many bits of a number
_FLOAT16 = Tolerance(norm=1e-1, vector=2e-1, whole=5e-2, later=2e-2, later_whole=2e-1, loss=5e-3, later_loss=5e-2)

TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(
        norm=1e-3,
        vector=2e-3,
        whole=1e-4,
        later=1e-3,
        later_whole=5e-2,
        loss=1e-4,
        later_loss=1e-2,
        floor=1e-5,
        scale=5e-4,
        parameter_scale=1e-3,
    ),
    "tf32": _FLOAT16,
    "fp16": _FLOAT16,
    "bf16": Tolerance(norm=2e-1, vector=3.5e-1, whole=1.5e-1, later=3e-2, later_whole=3e-1, loss=1e-2, later_loss=5e-2),
    "fp8": Tolerance(norm=3e-1, vector=6e-1, whole=2.5e-1, later=5e-2, later_whole=5e-1, loss=1e-2, later_loss=5e-2),
}

SCALE_OF_RESIDUAL, PARAMETER_SCALE_OF_RESIDUAL = 0.6, 1.5
"""A scale that is off by less than this part of the rest of the distance may be rounding: a very small model in bf16
is off by 0.8 % at a distance of 3 % (at most 0.28 of the rest where that is above 1 %; 0.81 for one parameter)."""

LOW_PRECISION_CLIPPING = 1e-2
"""Gradients that are stored in bf16 or fp16 are rounded after they are clipped, and their norm is a rounded number."""

LOW_PRECISION_OPTIMIZER = 5e-2
"""Parameters in bf16: a step is a few units of rounding, which two orders of the same operations place differently."""

ROUNDED_CLIPPING = 2**-8
"""Gradients in bf16, whose norm is measured in fp32: each number is rounded once when it is scaled and once when it is
clipped, by at most 2^-9 of itself."""

MOMENTS_KEPT = {"bf16": 2**-7, "8bit": 5e-2}
"""Distance of moments as they are kept from what the step gave, over their norm. bf16: the distance of two of its
numbers is at most 2^-7 of them. 8 bits: the upper nine tenths of a block's range have 64 numbers, 1.4 % of the largest
one apart, which is some 3 or 4 times the root mean square or more."""

LATER_8BIT = 5e-2
"""The scale of later steps with moments in 8 bits: a second moment that is small beside the largest of its block is
rounded to 0, and its parameter moves far (the biases of keys in a Qwen 2 of 8 blocks: 2.2e-2 in step 3)."""

PRODUCTS = 5e-2
"""Distance of a layer's products in fp8 from the recipe's on the same operands. Emulated 1.9e-3 (the result is bf16);
tensor cores that add up in some 14 bits may leave a few in a thousand more (assumed, no GPU has shown it)."""

CHANCE_DEVIATIONS = 6.0
"""Standard deviations that rounding by chance may be from its probabilities: once in 500 million checks by itself."""

AMPLIFIED = 50.0
"""Times what is expected of the second step's gradient: the first one's distance, as the plain run amplifies it."""

SENSITIVE = 10.0
"""Times further off than the gradients before it: from there on rounding may be all that a step shows."""

CHANGE_NORM = 1e-2
"""Of the norm of a parameter's change, where the optimizer is not replayed: it may depend on a sum that cancels."""

DROPOUT_NOISE = 2.0
"""Dropout's share of the gradient, as a variance, may be this many times that of the reference, or one part of it:
a few seeds on a few samples do not say more. Dropout that is off has none."""

SAME_STREAM = 0.01
"""Losses that are nearer to the reference's than this share of their spread over seeds come from the same masks."""

SAME_MASK = 1e-6
"""Losses of the same samples that differ by no more than this share come from the same masks. Those of other masks
differ by more than ten times that, or nothing is said."""

SAME_GRADIENT = 0.5
"""Gradients that are nearer to the reference's than this share of what two seeds are apart do so too."""

LARGE_PARAMETER = 4096
"""Elements from which a parameter's own scale is compared: with fewer, its rounding errors do not average out."""

START = 1e-6
"""Of the parameters before the first step."""

DTYPE_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}


def tolerance_of(config: TrainingConfig, dtypes: set[str]) -> Tolerance:
    """The tolerance of a candidate: the widest of its config's number formats and the dtypes of what trains.

    Of parameters that a run puts into bf16 the fp32 copies are compared. The reference keeps its moments as the
    optimizer gives them. It rounds the operands of fp8 too, and a number beside the border between two of 8 bits still
    falls to the other side.
    """
    stored = {DTYPE_PRECISION[dtype] for dtype in dtypes if dtype in DTYPE_PRECISION}
    formats = {config.precision, *stored, *(["fp8"] if config.fp8 != "off" else [])}
    widest = max((TOLERANCES[name] for name in formats), key=lambda tolerance: tolerance.vector)
    if config.parameters != "own":
        widest = widest.model_copy(update={"clipping": ROUNDED_CLIPPING})
    if config.optimizer_state != "own":  # each step is off by what its moments were rounded by
        bf16 = TOLERANCES["bf16"]
        later = {"later_whole": max(widest.later_whole, bf16.later_whole)}
        widest = widest.model_copy(update=later | {"later_loss": max(widest.later_loss, bf16.later_loss)})
    if config.optimizer_state == "8bit":
        widest = widest.model_copy(update={"later": max(widest.later, LATER_8BIT)})
    if not stored:
        return widest
    return widest.model_copy(update={"clipping": LOW_PRECISION_CLIPPING, "optimizer": LOW_PRECISION_OPTIMIZER})
