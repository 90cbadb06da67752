"""GGUF headers and data, and files that are broken in every way."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.gguf.reader import GgufFile


def write_sample(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_add_bos_token(True)
    writer.add_token_list(["a", "é", ""])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_array("flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("one", rng.standard_normal(5).astype(np.float32))
    writer.add_tensor("half", rng.standard_normal((2, 3, 4)).astype(np.float16))
    weights = rng.standard_normal((6, 64)).astype(np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_are_what_was_written(tmp_path: Path, alignment: int | None) -> None:
    path = write_sample(tmp_path / "sample.gguf", alignment)
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with closing(GgufFile(path)) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.block_count"] == 3
        assert file.metadata["tokenizer.ggml.add_bos_token"] is True
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
        assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
        assert file.metadata["flags"] == [True, False]
        assert list(file.tensors) == ["one", "half", "packed"]
        assert file.tensors["half"].shape == (2, 3, 4)
        assert file.tensors["packed"].shape == (6, 64)
        for name, place in file.tensors.items():
            assert place.offset == expected[name].data_offset
            rows = file.read(place, 0, place.num_rows)
            assert rows.tobytes() == expected[name].data.tobytes()
            assert np.array_equal(file.read(place, place.num_rows - 1, 1), rows[-1:])


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(sample: Path, tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(_patched(sample, 4, version.to_bytes(4, "little")))
    with closing(GgufFile(path)) as file:
        assert len(file.tensors) == 3


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, (1).to_bytes(4, "little"), "version: expected 2 or 3, found 1"),
        (4, (3).to_bytes(4, "big"), "version: expected a little-endian file"),
        (8, (1 << 60).to_bytes(8, "little"), "number of tensors: expected at most"),
        (16, (1 << 60).to_bytes(8, "little"), "number of metadata entries: expected at most"),
        (24, (1 << 62).to_bytes(8, "little"), "key of metadata entry 0: expected at most"),
    ],
)
def test_a_broken_start_is_named(
    sample: Path, tmp_path: Path, offset: int, data: bytes, message: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(_patched(sample, offset, data))
    with pytest.raises(ModelLoadError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"x\.gguf is missing"):
        GgufFile(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"x\.gguf is not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(ModelLoadError, match=r"x\.gguf is a folder, a device or a pipe"):
        GgufFile(tmp_path / "x.gguf")


def test_overlapping_tensors_are_refused(sample: Path, tmp_path: Path) -> None:
    with closing(GgufFile(sample)) as file:
        start = min(place.offset for place in file.tensors.values())
        inner = file.tensors["half"].offset - start
    data = sample.read_bytes()
    entry = data.index(b"half") + len("half") + 4 + 3 * 8 + 4
    assert int.from_bytes(data[entry : entry + 8], "little") == inner
    path = tmp_path / "x.gguf"
    path.write_bytes(_patched(sample, entry, bytes(8)))
    with pytest.raises(ModelLoadError, match="'half': expected an offset from byte"):
        GgufFile(path)


def test_a_file_cut_while_it_is_open_is_an_error(sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(sample.read_bytes())
    with closing(GgufFile(path)) as file:
        place = file.tensors["packed"]
        with path.open("r+b") as stream:
            stream.truncate(place.offset + 3)
        with pytest.raises(ModelLoadError, match="'packed': the file ends at byte"):
            file.read(place, 0, place.num_rows)


@given(data=st.data())
def test_truncated_files_are_refused(sample: Path, data: st.DataObject) -> None:
    """At any length; what follows the last tensor is padding."""
    whole = sample.read_bytes()
    with closing(GgufFile(sample)) as file:
        end = max(place.offset + place.num_bytes for place in file.tensors.values())
    length = data.draw(st.integers(0, end - 1))
    path = sample.with_name("cut.gguf")
    path.write_bytes(whole[:length])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        GgufFile(path)


@given(data=st.data())
def test_flipped_bytes_never_crash(sample: Path, data: st.DataObject) -> None:
    """Either the file is refused in words, or all that it says can be read."""
    whole = bytearray(sample.read_bytes())
    with closing(GgufFile(sample)) as file:
        header = min(place.offset for place in file.tensors.values())
    flips = st.lists(
        st.tuples(st.integers(0, header - 1), st.integers(1, 255)), min_size=1, max_size=4
    )
    for place, change in data.draw(flips):
        whole[place] ^= change
    path = sample.with_name("flipped.gguf")
    path.write_bytes(whole)
    try:
        with closing(GgufFile(path)) as file:
            for tensor in file.tensors.values():
                rows = file.read(tensor, 0, tensor.num_rows)
                assert rows.nbytes == tensor.num_bytes <= len(whole)
    except ModelLoadError as error:
        assert "flipped.gguf" in str(error)


def _patched(sample: Path, offset: int, data: bytes) -> bytes:
    whole = bytearray(sample.read_bytes())
    whole[offset : offset + len(data)] = data
    return bytes(whole)
