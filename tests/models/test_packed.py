"""Packs on disk: made once for a model's contents, mapped afterwards, and never in anybody's way."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from kakeya import kernels as native
from kakeya.errors import CorruptCheckpoint
from kakeya.kernels import LAYOUT, Kernels, PackedPart
from kakeya.models import packed, store
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.decoder import Decoder
from kakeya.models.loader import load_decoder
from kakeya.models.packed import packed_parts
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat
from support import gguf_files
from support.families import decoder_logits

TOKENS = [5, 9, 22, 13, 7, 60, 2, 31]


@dataclass(frozen=True)
class Files:
    """A model file, whose contents only its digest is made of, and the folder of its pack."""

    kernels: Kernels
    source: Path
    folder: Path

    def parts(self, *names: str) -> dict[str, PackedPart]:
        wanted = {name: MATRICES[name] for name in names or MATRICES}
        return packed_parts(self.kernels, [self.source], wanted)

    def packs(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def temporaries(self) -> list[Path]:
        return sorted(self.folder.glob(f"{store.WORKSPACE_PREFIX}*"))


def matrix_of(name: str, kind: Kind, rows: int) -> BlockTensor:
    raw = torch.from_numpy(gguf_files.random_blocks(kind, rows, 256, 0))
    return BlockTensor(BlockFormat[kind.name], raw, f"blk.{name}.weight")


MATRICES = {
    name: matrix_of(name, kind, rows)
    for name, kind, rows in (("a", Kind.Q4_K, 37), ("b", Kind.Q6_K, 16), ("c", Kind.Q4_0, 5))
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("KAKEYA_CACHE_DIR", str(tmp_path / "cache"))
    kernels = native.load(KernelChoice.NATIVE)
    assert kernels is not None
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    return Files(kernels, source, tmp_path / "cache" / "packed")


def wait_for_the_disk() -> None:
    for thread in threading.enumerate():
        if thread.name == "kakeya-pack":
            thread.join(30)


def same(found: dict[str, PackedPart], expected: dict[str, PackedPart]) -> bool:
    return found.keys() == expected.keys() and all(
        (part.format, part.outputs) == (expected[name].format, expected[name].outputs)
        and torch.equal(part.data, expected[name].data)
        for name, part in found.items()
    )


def in_memory(files: Files) -> dict[str, PackedPart]:
    return packed_parts(files.kernels, [], MATRICES)


def refuse_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(Kernels, "pack_blocks", refuse)


def load(path: Path, kernels: Kernels | None) -> Decoder:
    return load_decoder(
        open_checkpoint(path),
        dtype=DType.FLOAT32,
        weights=WeightFormat.AUTO,
        numerics=Numerics.FAST,
        kernels=kernels,
    )


def test_a_model_is_packed_once_and_mapped_then(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_files.write_mixed(tmp_path / "mixed.gguf")
    first = decoder_logits(load(path, files.kernels), TOKENS)
    wait_for_the_disk()
    assert len(files.packs()) == 1
    assert files.temporaries() == []
    refuse_to_pack(monkeypatch)
    copy = shutil.copy(path, tmp_path / "copy.gguf")
    for each in (path, Path(copy)):  # a pack is found by what the file holds, not by its name
        assert torch.equal(decoder_logits(load(each, files.kernels), TOKENS), first)
    expected = decoder_logits(load(path, None), TOKENS)
    assert (first - expected).abs().mean() < 0.1 * expected.abs().mean()


LOADS_AND_ENDS = """
import os, sys, time
from pathlib import Path
from kakeya import kernels
from kakeya.types import KernelChoice
import test_packed
settle = os.fsync
os.fsync = lambda handle: (time.sleep(1), settle(handle))
test_packed.load(Path(sys.argv[1]), kernels.load(KernelChoice.NATIVE))
"""


@pytest.mark.slow
def test_a_process_that_ends_at_once_leaves_a_pack(files: Files, tmp_path: Path) -> None:
    path = gguf_files.write_mixed(tmp_path / "mixed.gguf")
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", LOADS_AND_ENDS, path], env=environment, check=True)
    assert len(files.packs()) == 1
    assert files.temporaries() == []


def test_a_pack_is_a_safetensors_file_whose_data_begins_on_a_page(files: Files) -> None:
    made = files.parts()
    wait_for_the_disk()
    (path,) = files.packs()
    tensors = load_file(path)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: part.data.tolist() for name, part in made.items()
    }
    assert same(made, in_memory(files))
    assert (int.from_bytes(path.read_bytes()[:8], "little") + 8) % 4096 == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no list of mappings here")
def test_what_was_mapped_is_a_file_and_in_memory(files: Files) -> None:
    """Processes share its pages, so they must be the file's; and no process grows when it reads others."""
    files.parts()
    wait_for_the_disk()
    parts = files.parts()
    (path,) = files.packs()
    at = parts["a"].data.data_ptr()
    entries = re.findall(
        r"^(\w+)-(\w+) .*?(/.*)\nSize: +(\d+) kB\n(?:.*\n){2}Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    (held,) = [entry for entry in entries if int(entry[0], 16) <= at < int(entry[1], 16)]
    assert held[2] == str(path)
    assert held[3] == held[4]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"no JSON" + data[15:],
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: data.replace(b'"a"', b'"z"', 1),
        lambda data: data.replace(b'"data_offsets": [0,', b'"data_offsets": [1,', 1),
    ],
    ids=["empty", "no length", "cut", "longer", "huge header", "no JSON", "no object", "names", "offsets"],
)
def test_a_damaged_pack_is_made_anew(files: Files, damage: Callable[[bytes], bytes]) -> None:
    files.parts()
    wait_for_the_disk()
    (path,) = files.packs()
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    assert path.read_bytes() != sound
    assert same(files.parts(), in_memory(files))
    wait_for_the_disk()
    assert path.read_bytes() == sound


def test_a_pack_of_other_matrices_is_made_anew(files: Files) -> None:
    files.parts("a", "b")
    wait_for_the_disk()
    assert same(files.parts(), in_memory(files))
    wait_for_the_disk()
    (path,) = files.packs()
    assert set(load_file(path)) == {"a", "b", "c"}


def test_nothing_to_pack_leaves_nothing(files: Files) -> None:
    assert packed_parts(files.kernels, [files.source], {}) == {}
    assert same(in_memory(files), in_memory(files))
    assert not files.folder.exists()


def check_packed_into_memory(files: Files, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.WARNING):
        found = files.parts()
    wait_for_the_disk()
    assert same(found, in_memory(files))
    (record,) = caplog.records
    assert f"cannot be kept in {files.folder} ({reason})" in record.getMessage()


def test_a_folder_that_cannot_be_made(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.folder.parent.write_text("in the way")
    check_packed_into_memory(files, caplog, "Not a directory")


def test_a_full_disk(files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    check_packed_into_memory(files, caplog, "No space left on device")
    assert files.packs() == files.temporaries() == []


def test_a_system_that_cannot_reserve_space(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    assert same(files.parts(), in_memory(files))
    wait_for_the_disk()
    assert len(files.packs()) == 1


def test_a_disk_that_fails_in_the_background(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with caplog.at_level(logging.WARNING):
        found = files.parts()
        wait_for_the_disk()
    assert same(found, in_memory(files))
    (record,) = caplog.records
    assert "could not be kept" in record.getMessage()
    assert "Input/output error" in record.getMessage()
    assert files.packs() == files.temporaries() == []


def test_scales_that_are_not_numbers_are_named_and_leave_nothing(files: Files) -> None:
    bad = matrix_of("bad", Kind.Q4_K, 3)
    bad.raw[1, :2] = torch.from_numpy(np.array([np.nan], dtype=np.float16).view(np.uint8))
    for sources in ([], [files.source]):
        with pytest.raises(
            CorruptCheckpoint, match=r"tensor blk\.bad\.weight holds scales that are not finite"
        ):
            packed_parts(files.kernels, sources, {"a": MATRICES["a"], "bad": bad})
    assert files.packs() == files.temporaries() == []


def test_threads_may_make_the_same_pack_at_once(files: Files) -> None:
    expected = in_memory(files)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: files.parts(), range(8)))
    wait_for_the_disk()
    assert all(same(parts, expected) for parts in made)
    assert len(files.packs()) == 1
    assert files.temporaries() == []


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose contents were digested."""
    seen: list[Path] = []
    digest_of = store.digest_of

    def counted(path: Path) -> str:
        seen.append(path)
        return digest_of(path)

    monkeypatch.setattr(store, "digest_of", counted)
    return seen


def test_the_digest_is_remembered_while_the_file_is_the_same(files: Files, digested: list[Path]) -> None:
    for _ in range(3):
        files.parts()
        wait_for_the_disk()
    assert digested == [files.source]
    files.source.write_bytes(b"other weights")
    files.parts()
    wait_for_the_disk()
    assert digested == [files.source] * 2
    assert len(files.packs()) == 2


def test_a_note_that_was_cut_short_is_not_believed(files: Files, digested: list[Path]) -> None:
    """Two models with empty notes would share a pack."""
    files.parts()
    wait_for_the_disk()
    (note,) = files.folder.glob("*.digest")
    sound = note.read_text()
    note.write_text("")
    files.parts()
    assert note.read_text() == sound
    assert len(digested) == 2
    assert len(files.packs()) == 1


def test_all_files_of_a_split_model_are_digested(files: Files, digested: list[Path], tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(b"more")
    packed_parts(files.kernels, [files.source, second], MATRICES)
    files.parts()
    wait_for_the_disk()
    assert digested == [files.source, second, files.source]
    assert len(files.packs()) == 2


def write_pack(path: Path, header: object) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def aged(path: Path, days: float) -> Path:
    path.touch()
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))
    return path


def test_the_sweep_keeps_what_is_of_use(files: Files) -> None:
    files.folder.mkdir(parents=True)
    here, gone = ({"__metadata__": {"source": str(path)}} for path in (files.source, files.source / "x"))
    kept = [
        write_pack(files.folder / f"kept-{LAYOUT}.safetensors", here),
        aged(files.folder / f"{store.WORKSPACE_PREFIX}new", 0.0001),
        aged(files.folder / f"{store.WORKSPACE_PREFIX}locked", 2),
        aged(files.folder / "young.digest", 2),
    ]
    swept = [
        write_pack(files.folder / f"old-{LAYOUT + 1}.safetensors", here),
        write_pack(files.folder / f"gone-{LAYOUT}.safetensors", gone),
        write_pack(files.folder / f"nameless-{LAYOUT}.safetensors", {}),
        write_pack(files.folder / f"strange-{LAYOUT}.safetensors", {"__metadata__": 3}),
        write_pack(files.folder / f"list-{LAYOUT}.safetensors", []),
        aged(files.folder / f"{store.WORKSPACE_PREFIX}killed", 0.01),
        aged(files.folder / "old.digest", 30),
    ]
    with kept[2].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        packed._sweep(files.folder)
    assert [path for path in kept if not path.exists()] == []
    assert [path for path in swept if path.exists()] == []


def test_the_sweep_leaves_what_it_cannot_remove(files: Files) -> None:
    folder = files.folder / f"{store.WORKSPACE_PREFIX}folder"
    folder.mkdir(parents=True)
    aged(folder, 2)
    (files.folder / f"folder-{LAYOUT}.safetensors").mkdir()
    packed._sweep(files.folder)
    assert folder.exists()
