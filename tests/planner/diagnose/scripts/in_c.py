"""Writes with Python what C reads, and the other way round; changes files of the user in ways that are not `open`."""

import bz2
import importlib
import os
import shelve
import sqlite3
import tarfile
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers.models import BPE, WordLevel

# Libraries with files of their own.
Path("out").mkdir()
tokenizer = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
for name in ("out/tokenizer.json", "base.txt"):
    tokenizer.save(name)
    assert tokenizers.Tokenizer.from_file(name).get_vocab_size() == 2
tokenizer.save(path="kept/c.txt", pretty=False)
assert Path("kept/c.txt").read_text().startswith("{")
tokenizer.model.save("kept")
assert WordLevel.from_file("kept/vocab.json", unk_token="a").token_to_id("b") == 1
merges = BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
merges.save("old")
assert [BPE.from_file("old/vocab.json", merges="old/merges.txt").token_to_id(one) for one in ("ab", "c")] == [2, None]
assert len(BPE.from_file("old/vocab.json", "old/merges.txt").tokenize("ab")) == 1
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("out/saved")
assert transformers.AutoTokenizer.from_pretrained("out/saved").vocab_size == 2
for name in ("out/model.safetensors", "old/a.txt"):
    safetensors.numpy.save_file({"w": np.ones(3)}, name)
    with safetensors.safe_open(name, framework="np") as file:
        assert file.get_tensor("w").sum() == 3
    safetensors.torch.save_file({"w": torch.ones(2)}, name)
    assert safetensors.torch.load_file(name)["w"].sum() == 2
torch.save({"w": torch.ones(4)}, "out/model.pt")
assert torch.load("out/model.pt", mmap=True)["w"].sum() == 4
torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.ones(1)), "out/model.ts")
assert torch.jit.load("out/model.ts")(torch.ones(1)) == 1
with torch.autograd.profiler.profile() as profiler:
    torch.ones(1)
profiler.export_chrome_trace("out/trace.json")
assert os.path.getsize("out/trace.json")

# Python's own.
with tarfile.open("old/deep/b.txt", "w") as archive:
    archive.add("base.txt")
with tarfile.open("old/deep/b.txt") as archive:
    assert archive.getnames() == ["base.txt"]
with bz2.open("shared.txt", "wb") as packed:
    packed.write(b"x")
with bz2.open("shared.txt") as packed:
    assert packed.read() == b"x"
with shelve.open("out/shelf") as shelf:
    shelf["a"] = 1
with shelve.open("out/shelf") as shelf:
    assert shelf["a"] == 1
with sqlite3.connect("runs.db") as database:
    database.execute("create table runs (loss real)")
    database.execute("insert into runs values (0.5)")
database.close()
assert sqlite3.connect("runs.db").execute("select loss from runs").fetchall() == [(0.5,)]

# Modules.
Path("made_by_script.py").write_text("number = 3\n")
Path("made_package").mkdir()
Path("made_package/__init__.py").write_text("from made_package.inner import number\n")
Path("made_package/inner.py").write_text("number = 4\n")
importlib.invalidate_caches()
assert importlib.import_module("made_by_script").number == 3
assert importlib.import_module("made_package").number == 4

# Memory that is a file.
data = np.memmap("link", dtype=np.uint8)  # that of the user
data[0] = 7
assert Path("link").read_bytes() == b"base" and isinstance(data, np.memmap)
mapped = np.memmap("old/a.txt", dtype=np.uint8)  # what the script has made
mapped[0] = 7
mapped.flush()
assert Path("old/a.txt").read_bytes()[0] == 7
Path("/dev/shm/autoplan_test.bin").write_bytes(b"x")
assert "autoplan_test.bin" in os.listdir("/dev/shm") and Path("/dev/shm/autoplan_test.bin").read_bytes() == b"x"
os.makedirs("/dev/shm/mp_autoplan_test/torch_data")
assert "mp_autoplan_test" in os.listdir("/dev/shm")
shared = torch.ones(3).share_memory_()
assert shared.is_shared()
