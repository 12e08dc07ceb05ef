"""Files of tokens as nanoGPT and numpy write them, and files that are none."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import autoplan
from autoplan.data import TokenFile
from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.loading.source import open_source, spec_of_text


@pytest.fixture
def bin_file(tmp_path: Path) -> Path:
    """As nanoGPT's prepare.py: np.array(ids, dtype=np.uint16).tofile("train.bin")."""
    path = tmp_path / "train.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    return path


def test_windows_have_targets_shifted_by_one_and_cover_the_file(bin_file: Path):
    data = autoplan.data.TokenFile(bin_file, 64)
    assert data.num_tokens == 1000
    assert len(data) == (1000 - 1) // 64
    inputs, targets = data[3]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == list(range(192, 256))
    assert targets.tolist() == list(range(193, 257))
    assert torch.cat([data[index][0] for index in range(len(data))]).tolist() == list(range(64 * len(data)))
    assert data[-1][0].tolist() == data[len(data) - 1][0].tolist()
    with pytest.raises(IndexError):
        data[len(data)]
    assert len(TokenFile(bin_file, 64, stride=1)) == 1000 - 64
    assert len(TokenFile(bin_file, 999)) == 1


def test_a_batch_for_transformers_has_labels_that_the_model_shifts_itself(bin_file: Path):
    sample = TokenFile(bin_file, 16, form="transformers")[1]
    assert sample["input_ids"].tolist() == sample["labels"].tolist() == list(range(16, 32))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_each_dtype_is_read_from_bin_and_npy(tmp_path: Path, dtype: str):
    ids = np.array([5, 60000 if dtype != "uint16" else 600, 7, 8, 9], dtype=dtype)
    ids.tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", ids)
    for data in (TokenFile(tmp_path / "t.bin", 4, dtype), TokenFile(tmp_path / "t.npy", 4)):
        assert data[0][0].tolist() == ids[:4].tolist()


def test_it_travels_without_its_tokens(bin_file: Path):
    data = TokenFile(bin_file, 64)
    packed = pickle.dumps(data)
    assert len(packed) < 2000
    assert pickle.loads(packed)[2][0].tolist() == data[2][0].tolist()


def test_its_order_is_shuffled_resumable_and_split(bin_file: Path):
    data = TokenFile(bin_file, 16)
    order = list(data.order(seed=5, global_batch=4))
    assert order != sorted(order)
    assert list(data.order(seed=5, start=8, global_batch=4)) == order[8:]
    assert list(data.order(seed=5, rank=1, ranks=2, global_batch=4)) == order[1::2]


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, bin_file: Path):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"\0" * 1001)
    (tmp_path / "empty.bin").touch()
    np.save(tmp_path / "two.npy", np.zeros((3, 4), dtype=np.int64))
    np.save(tmp_path / "real.npy", np.zeros(30))
    (tmp_path / "text.npy").write_text("no numpy")
    cases = [
        ((odd, 8), "1,001 bytes, which is no multiple of the 2 bytes of a uint16 id"),
        ((bin_file, 8, "uint64x"), "none of token ids"),
        ((bin_file, 8, "float32"), "none of token ids"),
        ((bin_file, 1000), "has 1,000 tokens, and a window takes 1,001"),
        ((tmp_path / "empty.bin", 8), "0 bytes, which is nothing"),
        ((tmp_path / "none.bin", 8), "cannot be read"),
        ((tmp_path / "two.npy", 8), "a 2-dim array of int64"),
        ((tmp_path / "real.npy", 8), "a 1-dim array of float64"),
        ((tmp_path / "text.npy", 8), "no array of numpy"),
        ((bin_file, 0), "sequence_length is 0"),
    ]
    for arguments, says in cases:
        with pytest.raises(WorkloadError, match=says):
            TokenFile(*arguments)


def test_an_id_above_the_vocabulary_is_named_with_its_place(bin_file: Path):
    data = TokenFile(bin_file, 64, vocab_size=500)
    assert data[0][0][-1] == 63
    with pytest.raises(WorkloadError, match="has the id 500 at token 500; the vocabulary has 500 ids"):
        data[7]
    with pytest.raises(WorkloadError, match="has the id 500 at token 500"):
        data.check()
    TokenFile(bin_file, 64, vocab_size=1000).check()


def test_the_command_line_reads_a_file_in_windows_of_the_model(bin_file: Path):
    dataset = open_source(spec_of_text(str(bin_file), sequence_length=32, vocabulary=1000)).dataset
    assert dataset[0]["input_ids"].shape == (32,)
    with pytest.raises(WorkloadError, match="no sequence length"):
        spec_of_text(str(bin_file))
    bin_file.write_bytes(bytes(1001))
    with pytest.raises(WorkloadError, match="no multiple of the 2 bytes") as refused:  # before a search begins
        spec_of_text(str(bin_file), sequence_length=8)
    assert "--loader file.py:make_dataset" in str(refused.value.flag_hint)
