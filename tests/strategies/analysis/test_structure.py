"""Blocks, head, embeddings and ties are found in models of different make, without a number being read."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from autoplan.strategies.analysis.structure import disable_dropout, find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.attention import AttentionStrategy
from tests.recorded import make_hardware
from tests.strategies.tiny import BERT, GPT2, LLAMA, T5, Classifier, language


def on_meta(workload):
    with torch.device("meta"):
        return workload.build_model()


@pytest.mark.parametrize(
    ("fields", "stacks", "head", "tied"),
    [
        (GPT2, [["transformer.h.0", "transformer.h.1", "transformer.h.2"]], "lm_head", True),
        (LLAMA, [["model.layers.0", "model.layers.1"]], "lm_head", False),
        (BERT, [["bert.encoder.layer.0", "bert.encoder.layer.1"]], "cls.predictions.decoder", True),
        (
            T5,
            [["encoder.block.0", "encoder.block.1"], ["decoder.block.0", "decoder.block.1", "decoder.block.2"]],
            "lm_head",
            True,
        ),
    ],
    ids=["gpt2", "llama", "bert", "t5"],
)
def test_language_models(fields, stacks, head, tied):
    structure = find_structure(on_meta(language(fields)))
    assert [[name for name, _ in stack] for stack in structure.stacks] == stacks
    assert structure.head is not None and structure.head[0] == head
    assert bool(structure.tied) is tied
    assert structure.embeddings
    assert not structure.micro_batch_dependent


def test_stages_of_an_image_model():
    structure = find_structure(Classifier())
    assert [[name for name, _ in stack] for stack in structure.stacks] == [
        ["stages.0.0", "stages.0.1"],
        ["stages.1.0", "stages.1.1"],
    ]
    assert structure.head is not None and structure.head[0] == "classify"
    assert not structure.tied


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet", {"ResNetBottleNeckLayer": [3, 4, 6, 3]}),
        ("swin", {"SwinLayer": [2, 2, 6, 2]}),
        ("convnext", {"ConvNextLayer": [3, 3, 9, 3]}),
        ("mixtral", {"MixtralDecoderLayer": [2]}),
        ("whisper", {"WhisperEncoderLayer": [4], "WhisperDecoderLayer": [4]}),
    ],
)
def test_published_models(name, blocks):
    import transformers

    options = {"num_hidden_layers": 2, "num_local_experts": 4} if name == "mixtral" else {}
    config = transformers.AutoConfig.for_model(name, **options)
    auto = {"mixtral": "AutoModelForCausalLM", "whisper": "AutoModelForSpeechSeq2Seq"}
    kind = getattr(transformers, auto.get(name, "AutoModelForImageClassification"))
    with torch.device("meta"):
        structure = find_structure(kind.from_config(config))
    found: dict[str, list[int]] = {}
    for stack in structure.stacks:
        found.setdefault(type(stack[0][1]).__name__, []).append(len(stack))
    assert found == blocks
    assert structure.head is not None
    assert bool(structure.micro_batch_dependent) is (name == "resnet")


def test_batch_norm_is_found_and_frozen_batch_norm_is_not():
    model = Classifier(norm=True)
    found = find_structure(model).micro_batch_dependent
    assert [dependent.module for dependent in found] == [f"stages.{i}.{j}.norm" for i in (0, 1) for j in (0, 1)]
    model.eval()
    assert not find_structure(model).micro_batch_dependent


def test_experts_are_parts_of_a_block_not_blocks():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([Expert() for _ in range(4)])
            self.norm = nn.LayerNorm(4)

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    structure = find_structure(model)
    assert [name for name, _ in structure.blocks] == ["layers.0", "layers.1"]


def test_a_plain_stack_of_linears_has_no_blocks():
    assert not find_structure(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))).blocks


def test_auxiliary_loss_of_experts_is_micro_batch_dependent():
    model = on_meta(language(LLAMA))
    model.config.output_router_logits = True
    assert find_structure(model).micro_batch_dependent


@pytest.mark.parametrize("fields", [GPT2, T5, BERT, LLAMA | {"attention_dropout": 0.3}])
def test_disable_dropout_makes_two_forwards_equal(fields):
    workload = language(fields)
    model = workload.build_model().train()
    batch = workload.make_batch(2, 0)
    with torch.no_grad():
        assert not torch.equal(workload.loss(model, batch).total, workload.loss(model, batch).total)
        disable_dropout(model)
        assert torch.equal(workload.loss(model, batch).total, workload.loss(model, batch).total)


@pytest.mark.parametrize("fields", [GPT2, T5, BERT])
def test_disable_dropout_leaves_a_config_that_models_share_as_it_is(fields):
    import transformers

    config = transformers.AutoConfig.for_model(**fields)
    before = copy.deepcopy(config.to_dict())
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForMaskedLM
    kind = transformers.AutoModelForCausalLM if config.model_type == "gpt2" else kind
    model = kind.from_config(config)
    model.config = config  # as a user's own class does, which keeps what it is given
    disable_dropout(model)
    assert config.to_dict() == before
    assert all(not module.p for module in model.modules() if isinstance(module, nn.Dropout))
    assert any(module.p for module in kind.from_config(config).modules() if isinstance(module, nn.Dropout))


def test_a_module_list_of_sequentials_has_blocks() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    model = nn.Module()
    model.layers = nn.ModuleList([layer(), layer(), layer()])
    assert [name for name, _ in find_structure(model).blocks] == ["layers.0", "layers.1", "layers.2"]
    stages = nn.Sequential(nn.Sequential(layer(), layer()), nn.Sequential(layer(), layer()))
    assert find_structure(stages).blocks == [], "a Sequential of Sequentials may be stages, or layers"


class Preference(nn.Module):
    """The policy, and the frozen reference before it in the order of the modules."""

    def __init__(self, build) -> None:
        super().__init__()
        self.reference = build().requires_grad_(False).eval()
        self.policy = build()


def test_a_frozen_reference_is_not_what_is_trained():
    model = Preference(language(LLAMA).build_model)
    structure = find_structure(model)
    assert [name for name, _ in structure.blocks] == ["policy.model.layers.0", "policy.model.layers.1"]
    assert [[name for name, _ in stack] for stack in structure.frozen_stacks] == [
        ["reference.model.layers.0", "reference.model.layers.1"]
    ]
    assert structure.head is not None and structure.head[0] == "policy.lm_head"
    assert len(structure.all_blocks) == 4


def test_a_frozen_model_with_a_trained_part_keeps_its_blocks():
    """Soft prompts: gradients flow through the frozen blocks, so their activations are kept, and can be recomputed."""
    model = language(LLAMA).build_model().requires_grad_(False)
    model.prompt = nn.Parameter(torch.zeros(4, 64))
    structure = find_structure(model)
    assert len(structure.blocks) == 2 and not structure.frozen_stacks


def test_attention_is_offered_for_the_models_inside():
    strategy = AttentionStrategy()
    model = Preference(language(LLAMA).build_model)
    offered = strategy.choices(language(), find_structure(model), make_hardware(), "cpu")
    assert "eager" in offered.values

    workload = dataclasses.replace(language(LLAMA), build_model=lambda: Preference(language(LLAMA).build_model))
    run = prepare(workload, TrainingConfig(micro_batch=2, attention="eager"))
    assert run.model.policy.config._attn_implementation == run.model.reference.config._attn_implementation == "eager"


class Sized(nn.Module):
    """A block of two matrices, in any size."""

    def __init__(self, inputs: int = 8, outputs: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 16), nn.Linear(16, outputs)


def names(model: nn.Module) -> list[list[str]]:
    return [[name for name, _ in stack] for stack in find_structure(model).stacks]


def test_layers_that_are_lists_of_norm_attention_and_residual() -> None:
    """x-transformers and vit-pytorch: nothing calls the inner list, so its modules are the blocks."""
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleList([nn.LayerNorm(8), kind(), None]) for _ in range(2) for kind in (Attends, Sized)
    )
    assert names(model) == [["layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1"]]
    pair = nn.Module()
    pair.encoder, pair.decoder = copy.deepcopy(model), copy.deepcopy(model)
    assert [len(stack) for stack in names(pair)] == [4, 4]


class Attends(Sized):
    """Another class of block."""


def test_a_stage_that_is_a_list_of_two_equal_blocks_is_a_stack_of_its_own() -> None:
    model = nn.Module()
    model.downs = nn.ModuleList(nn.ModuleList([Sized(), Sized(), Attends()]) for _ in range(2))
    assert names(model) == [[f"downs.{stage}.{part}" for part in range(3)] for stage in range(2)]


def test_lists_that_have_a_part_of_each_layer_are_no_blocks() -> None:
    """A Fourier neural operator: the convolutions are single tensors; the MLPs beside them are not the layers."""
    model = nn.Module()
    model.lifting, model.projection = Sized(2, 8), Sized(8, 1)
    model.layers = nn.Module()
    model.layers.convs = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    model.layers.mlps = nn.ModuleList(Sized() for _ in range(3))
    assert names(model) == []
    model.layers.convs = nn.ModuleList(Sized(256, 256) for _ in range(3))
    assert names(model) == [["layers.convs.0", "layers.convs.1", "layers.convs.2"]]


def test_a_student_and_its_teacher_are_no_stack() -> None:
    model = nn.Module()
    model.student, model.teacher = Sized(), Sized().requires_grad_(False)
    assert names(model) == []
    model.second = Sized()
    assert names(model) == [["student", "second"]]
