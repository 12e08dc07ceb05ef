"""How far a candidate may be from the reference, by precision. Loads no torch.

Each figure is measured: tests/planner/parity/test_parity_variants.py runs about a hundred correct variants, and
docs/parity.md has the largest difference of each kind beside what passes.
"""

from __future__ import annotations

from autoplan.record import Record


class Tolerance(Record):
    """The largest relative differences that pass.

    Attributes:
        norm: Of the norm of a parameter's gradient.
        vector: Of a parameter's gradient: ||g - g_ref|| / ||g_ref||.
        floor: A parameter whose gradient is smaller than this share of the whole gradient is measured against that
            share: what is left of a gradient that cancels (a key's bias, a router's gate) is rounding.
        scale: Of <g, g_ref> / <g_ref, g_ref> from 1, over the whole gradient and over each large parameter.
        parameter_scale: The same for one large parameter alone.
        later: The scale and the distance of the whole gradient from the second step on, when parameters differ.
        loss: Of the loss.
        clipping: Of the norm before clipping and the share that clipping leaves.
        optimizer: Distance of a parameter from the replayed optimizer's, over its change.
    """

    norm: float
    vector: float
    floor: float
    scale: float
    parameter_scale: float
    later: float
    loss: float
    clipping: float
    optimizer: float


TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(
        norm=1e-3,
        vector=2e-3,
        floor=1e-5,
        scale=5e-4,
        parameter_scale=1e-3,
        later=1e-3,
        loss=1e-4,
        clipping=1e-3,
        optimizer=2e-5,
    ),
    "tf32": Tolerance(
        norm=2e-2,
        vector=1.5e-1,
        floor=1e-3,
        scale=5e-3,
        parameter_scale=2e-2,
        later=2e-2,
        loss=5e-3,
        clipping=1e-3,
        optimizer=2e-5,
    ),
    "fp16": Tolerance(
        norm=2e-2,
        vector=1.5e-1,
        floor=1e-3,
        scale=5e-3,
        parameter_scale=2e-2,
        later=2e-2,
        loss=5e-3,
        clipping=1e-3,
        optimizer=2e-5,
    ),
    "bf16": Tolerance(
        norm=5e-2,
        vector=2e-1,
        floor=1e-3,
        scale=5e-3,
        parameter_scale=2e-2,
        later=2e-2,
        loss=1e-2,
        clipping=1e-3,
        optimizer=2e-5,
    ),
}

LOW_PRECISION_CLIPPING = 1e-2
"""Gradients that are stored in bf16 or fp16 are rounded after they are clipped, and their norm is a rounded number."""

LOW_PRECISION_OPTIMIZER = 5e-2
"""Parameters in bf16: a step is a few units of rounding, which two orders of the same operations place differently."""

DROPOUT_NOISE = 2.0
"""Dropout's share of the gradient, as a variance, may be this many times that of the reference, or one part of it:
a few seeds on a few samples do not say more. Dropout that is off has none."""

SAME_STREAM = 0.05
"""Losses that are nearer to the reference's than this share of their spread over seeds come from the same masks."""

LARGE_PARAMETER = 4096
"""Elements from which a parameter's own scale is compared: with fewer, its rounding errors do not average out."""

START = 1e-6
"""Of the parameters before the first step."""

DTYPE_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}


def tolerance_of(precision: str, dtypes: set[str]) -> Tolerance:
    """The tolerance of a candidate: the widest of its config's precision and its parameters' dtypes.

    Args:
        precision: TrainingConfig.precision.
        dtypes: Of the parameters that train.
    """
    stored = {DTYPE_PRECISION[dtype] for dtype in dtypes if dtype in DTYPE_PRECISION}
    widest = max((TOLERANCES[name] for name in {precision, *stored}), key=lambda tolerance: tolerance.vector)
    if not stored:
        return widest
    return widest.model_copy(update={"clipping": LOW_PRECISION_CLIPPING, "optimizer": LOW_PRECISION_OPTIMIZER})
