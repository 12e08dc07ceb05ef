"""SyncBatchNorm by the user's word: refused on a CPU, never searched, and what it is compared with."""

import pytest
import torch
from torch import nn

from autoplan.errors import ConfigError
from autoplan.planner.parity.batches import interleaved
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig, knobs
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.techniques.batch_norm import BatchNormStrategy, synchronise
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.workloads.workload import TrainingModule
from tests.recorded import make_hardware
from tests.strategies.tiny import classifier, language


def test_a_cpu_refuses_it_and_says_what_to_do():
    workload = classifier(norm=True, fixed_micro_batch=4)
    model = workload.build_model()
    (found,) = BatchNormStrategy().choices(workload, find_structure(model), make_hardware(), "cpu").left_out
    assert found.value == "sync" and "CUDA alone" in found.reason
    build = Build(
        workload=workload,
        config=TrainingConfig(micro_batch=4, dp_replicate=2, batch_norm="sync"),
        device=torch.device("cpu"),
        model=model,
        module=TrainingModule(model, workload.loss),
        structure=find_structure(model),
    )
    with pytest.raises(ConfigError, match="CUDA alone") as raised:
        BatchNormStrategy().apply(build)
    assert "batch_norm=own" in (raised.value.hint or "")


def test_ranks_that_another_trainer_starts_share_statistics_in_the_default_group():
    workload = classifier(norm=True, fixed_micro_batch=4)
    model = workload.build_model()
    build = Build(
        workload=workload,
        config=TrainingConfig(micro_batch=4, dp_replicate=2, batch_norm="sync"),
        device=torch.device("cuda"),
        model=model,
        module=TrainingModule(model, workload.loss),
        structure=find_structure(model),
    )
    BatchNormStrategy().apply(build)
    found = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert {(type(norm), norm.process_group) for norm in found} == {(nn.SyncBatchNorm, None)}


def test_it_is_offered_on_cuda_where_there_is_batch_norm_and_never_searched():
    normed, plain = classifier(norm=True, fixed_micro_batch=4), language()
    offered = [
        BatchNormStrategy().choices(one, find_structure(one.build_model()), make_hardware(), "cuda").values
        for one in (normed, plain)
    ]
    assert offered == [("own", "sync"), ("own",)]
    assert knobs()["batch_norm"].unpriced


def test_it_needs_ranks_along_one_axis():
    assert "several data-parallel ranks" in (incompatible(TrainingConfig(micro_batch=1, batch_norm="sync")) or "")
    for degrees in ({"dp_replicate": 2}, {"dp_shard": 2}):
        assert incompatible(TrainingConfig.model_validate({"micro_batch": 1, "batch_norm": "sync"} | degrees)) is None
    both = TrainingConfig(micro_batch=1, batch_norm="sync", dp_replicate=2, dp_shard=2)
    assert "one axis" in (incompatible(both) or "")


def test_only_norms_that_train_are_converted():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model[1][1].eval()
    weight = model[0].weight
    synchronise(model, None)
    assert type(model[0]) is nn.SyncBatchNorm and model[0].weight is weight
    assert type(model[1][1]) is nn.BatchNorm1d


def test_the_reference_runs_the_samples_that_ranks_normalise_together():
    batch = {"x": torch.arange(12), "scale": torch.tensor(2.0)}
    found = interleaved(batch, ranks=2, micro_batch=2)
    assert found["x"].tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert found["scale"] == 2.0
