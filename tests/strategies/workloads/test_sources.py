"""Specs and workloads from names, files, functions and objects; and the errors that each kind of bad input gets."""

import json
import subprocess
import sys

import pytest
import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads import registry
from autoplan.strategies.workloads.sources import load_workload, make_spec, spec_from_objects
from autoplan.strategies.workloads.workload import Workload
from tests.strategies.tiny import GPT2, Classifier, image_batch, image_loss, sgd

FUNCTION_FILE = """
import torch, torch.nn.functional as F
import autoplan
from autoplan.strategies.workloads.workload import LossSum

def workload(global_batch=6, width: int = 4):
    return autoplan.Workload(
        name=f"wide {width}",
        build_model=lambda: torch.nn.Linear(3, width),
        make_batch=lambda n, i: {"x": torch.randn(n, 3), "y": torch.zeros(n).long()},
        loss=lambda m, b: LossSum(F.cross_entropy(m(b["x"]), b["y"], reduction="sum"), len(b["y"])),
        build_optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=global_batch,
    )

def broken():
    raise RuntimeError("no such data")

def wrong():
    return 7

number = 3
"""


@pytest.fixture
def function_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION_FILE)
    return path


def test_every_built_in_configuration_is_a_model_of_transformers():
    from transformers import AutoConfig

    for name in registry.list_models():
        fields = dict(registry.read_config(name))
        AutoConfig.for_model(fields.pop("model_type"), **fields)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("t5-small", 60_506_624),
    ],
)
def test_parameter_counts_are_the_published_ones(name, parameters):
    with torch.device("meta"):
        model = load_workload(make_spec(model=name, sequence_length=128)).build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_defaults_are_said():
    spec = make_spec(model="gpt2")
    assert (spec.sequence_length, spec.global_batch) == (1024, 32)
    assert len(spec.defaults_used) == 2
    assert "1024" in spec.defaults_used[0] and "32" in spec.defaults_used[1]
    assert make_spec(model="llama3.2-1b").sequence_length == 8192
    assert not make_spec(model="gpt2", sequence_length=64, global_batch=2).defaults_used


def test_aliases_and_identity():
    assert make_spec(model="openai-community/gpt2").identity == make_spec(model="GPT2").identity
    plain = make_spec(model="gpt2").identity
    assert make_spec(model="gpt2", global_batch=64).identity != plain
    assert make_spec(model="gpt2", options={"learning_rate": 1e-3}).identity != plain


def test_making_a_spec_loads_no_torch(function_file):
    code = (
        "import sys; from autoplan.strategies.workloads.sources import make_spec; make_spec(model='gpt2'); "
        f"make_spec(model={str(function_file) + ':workload'!r}); "
        "from autoplan.strategies.analysis.facts import WorkloadFacts; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    spec = make_spec(model=str(tmp_path / "config.json"), sequence_length=16)
    assert spec.kind == "config"
    assert load_workload(spec).make_batch(2, 0)["input_ids"].shape == (2, 16)


def test_the_weights_of_a_folder_are_loaded_and_fill_a_model_built_elsewhere(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
    model.save_pretrained(tmp_path)
    spec = make_spec(model=str(tmp_path), sequence_length=16)
    assert spec.kind == "folder"
    workload = load_workload(spec)
    with torch.device("meta"):
        empty = workload.build_model()
    filled = empty.to_empty(device="cpu")
    assert workload.load_weights is not None
    workload.load_weights(filled)
    assert torch.equal(filled.transformer.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight)
    loaded = workload.build_model()
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_function_decides_what_was_not_given(function_file):
    spec = make_spec(model=f"{function_file}:workload")
    assert set(spec.open_fields) == {"global_batch", "sequence_length"}
    assert load_workload(spec).global_batch == 6
    given = make_spec(model=f"{function_file}:workload", global_batch=10, options={"width": 8})
    workload = load_workload(given)
    assert (workload.global_batch, workload.name) == (10, "wide 8")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (" ", ["no model was named"]),
        ("gpt3", ["gpt2"]),
        ("lama2-7b", ["llama2-7b"]),
        ("nothing/at/all.json", ["cannot be read"]),
        ("missing.py:workload", ["there is no file"]),
    ],
)
def test_unknown_models(model, says):
    with pytest.raises(WorkloadError) as raised:
        make_spec(model=model)
    assert raised.value.hint
    assert all(text in str(raised.value) for text in says)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}'])
def test_broken_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(WorkloadError) as raised:
        make_spec(model=str(path), sequence_length=8)
    assert str(path) in str(raised.value) and raised.value.hint


def test_unknown_model_type_and_refused_fields(tmp_path):
    for fields in ({"model_type": "no-such-model"}, GPT2 | {"n_head": 7}):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        spec = make_spec(model=str(path), sequence_length=8)
        with pytest.raises(WorkloadError):
            load_workload(spec).build_model()


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True])
def test_counts_are_whole_and_positive(value):
    for name in ("global_batch", "sequence_length"):
        with pytest.raises(WorkloadError, match="whole number"):
            make_spec(model="gpt2", **{name: value})


@pytest.mark.parametrize(
    ("function", "says"),
    [("broken", "no such data"), ("wrong", "int"), ("number", "not a function")],
)
def test_functions_that_do_not_give_a_workload(function_file, function, says):
    with pytest.raises(WorkloadError, match=says):
        load_workload(make_spec(model=f"{function_file}:{function}"))


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("gpt2", {"sequence_length": 2048}, "1024"),
        ("gpt2", {"options": {"learning_rat": 1}}, "learning_rate"),
        ("FILE:workload", {"sequence_length": 16}, "sequences of None"),
        ("FILE:workload", {"options": {"depth": 3}}, "takes no depth"),
        ("FILE:worklaod", {}, "workload"),
    ],
)
def test_what_a_model_or_a_function_does_not_take(function_file, model, options, says):
    with pytest.raises(WorkloadError, match=says):
        load_workload(make_spec(model=model.replace("FILE", str(function_file)), **options))


def test_files_that_are_not_python_or_raise(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def workload(:\n")
    with pytest.raises(WorkloadError, match="line 1"):
        make_spec(model=f"{path}:workload")
    path.write_text("def workload(): pass\nimport no_such_module_anywhere\n")
    with pytest.raises(WorkloadError, match="no_such_module_anywhere"):
        load_workload(make_spec(model=f"{path}:workload"))


def test_objects_travel_with_the_spec():
    width = 5
    spec = spec_from_objects(
        model=Classifier,
        make_batch=image_batch,
        loss=image_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01 * width),
        global_batch=6,
    )
    workload = load_workload(spec)
    assert isinstance(workload, Workload)
    assert workload.build_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] == 0.05
    assert spec.unit == "samples" and spec.kind == "object"
    with pytest.raises(WorkloadError, match="does not carry"):
        load_workload(type(spec).model_validate_json(spec.model_dump_json()))


def test_a_model_and_its_optimizer_as_instances(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = Classifier()
    optimizer = torch.optim.AdamW(
        [{"params": model.stem.parameters(), "lr": 0.5}, {"params": model.classify.parameters()}], lr=0.25
    )
    spec = spec_from_objects(model=model, make_batch=image_batch, loss=image_loss, optimizer=optimizer, global_batch=4)
    workload = load_workload(spec)
    copy = workload.build_model()
    assert copy is not workload.build_model()
    made = workload.build_optimizer(list(copy.parameters()))
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    assert made.param_groups[1]["params"][0] is copy.classify.weight


@pytest.mark.parametrize("missing", ["model", "make_batch", "optimizer", "loss"])
def test_missing_parts(missing):
    parts = {"model": Classifier(), "make_batch": image_batch, "optimizer": sgd, "loss": image_loss}
    with pytest.raises(WorkloadError, match=missing):
        spec_from_objects(**{**parts, missing: None}, global_batch=4)


def test_an_inspected_function_loads_again_as_it_was(function_file):
    from autoplan.strategies.inspect import inspect_workload
    from tests.recorded import make_hardware

    facts = inspect_workload(make_spec(model=f"{function_file}:workload"), make_hardware(), "cpu")
    assert (facts.spec.global_batch, facts.spec.sequence_length, facts.spec.open_fields) == (6, None, ())
    again = load_workload(type(facts.spec).model_validate_json(facts.spec.model_dump_json()))
    assert (again.global_batch, again.name) == (6, "wide 4")


def test_a_small_model_is_offered_other_numbers_of_threads_than_torchs_own(function_file):
    from autoplan.strategies.inspect import inspect_workload
    from tests.recorded import make_hardware

    torch.set_num_threads(2)  # the fixture of this folder puts it back
    facts = inspect_workload(make_spec(model=f"{function_file}:workload"), make_hardware(), "cpu")
    threads = next(choices for choices in facts.choices if choices.knob == "threads").values
    assert threads[0] is None
    assert 1 in threads
    assert 2 not in threads
    assert torch.get_num_threads() == 2


FIXED_CLIPPING = """
import functools
from autoplan.strategies.workloads.workload import Workload
from tests.strategies.tiny import Classifier, image_batch, image_loss, sgd

def fixed():
    return Workload(name="c", build_model=Classifier, make_batch=image_batch, loss=image_loss, build_optimizer=sgd,
                    global_batch=8, max_grad_norm=1.0)

def asked(max_grad_norm=1.0):
    return Workload(name="c", build_model=Classifier, make_batch=image_batch, loss=image_loss, build_optimizer=sgd,
                    global_batch=8, max_grad_norm=max_grad_norm)
"""


@pytest.mark.parametrize("none", [None, 0])
def test_no_clipping_is_asked_of_a_function_or_refused(none, tmp_path):
    path = tmp_path / "clipping.py"
    path.write_text(FIXED_CLIPPING)
    with pytest.raises(WorkloadError, match="takes no max_grad_norm"):
        load_workload(make_spec(model=f"{path}:fixed", options={"max_grad_norm": none}))
    assert load_workload(make_spec(model=f"{path}:asked", options={"max_grad_norm": none})).max_grad_norm is None
    assert load_workload(make_spec(model=f"{path}:asked")).max_grad_norm == 1.0


def test_a_part_beside_a_whole_workload_is_refused():
    from tests.strategies.tiny import classifier

    with pytest.raises(WorkloadError, match="max_grad_norm too, which would be dropped"):
        spec_from_objects(classifier(), max_grad_norm=1.0)


GEMMA3 = {
    **{"model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    **{"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}


def test_batches_have_no_padding_token(tmp_path):
    """Gemma 3 makes NaN gradients of a sequence that begins with it, since its embedding is zero."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    spec = make_spec(model=str(tmp_path / "config.json"), sequence_length=64, global_batch=16)
    workload = load_workload(spec)
    torch.manual_seed(0)
    model = workload.build_model()
    assert model.config.pad_token_id == 0 and not model.get_input_embeddings().weight[0].any()
    for index in range(3):
        batch = workload.make_batch(16, index)
        assert set(batch["input_ids"].unique().tolist()) <= set(range(1, 512))
        model.zero_grad()
        workload.loss(model, batch).total.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert {1, 2} <= set(batch["input_ids"].unique().tolist()), "the frequent ones are the small numbers still"
