import errno
import hashlib
import io
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from kakeya.errors import DownloadFailed
from kakeya.models import store


def test_cache_dir_is_the_variable_or_the_users_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.cache_dir() == cache
    assert store.models_dir() == cache / "models"
    monkeypatch.setenv(store.CACHE_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.cache_dir().name == "kakeya"
    assert store.cache_dir() != cache


def test_a_workspace_is_gone_afterwards_also_after_an_error(cache: Path) -> None:
    with store.workspace() as folder:
        (folder / "file").write_text("half")
        assert folder.parent == cache
    assert list(cache.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), store.workspace() as folder:
        (folder / "file").write_text("half")
        raise KeyboardInterrupt
    assert list(cache.iterdir()) == []


def test_a_file_in_place_of_the_cache_directory(cache: Path) -> None:
    cache.write_text("in the way")
    with pytest.raises(DownloadFailed, match=r"cannot be written .*KAKEYA_CACHE_DIR"), store.workspace():
        pytest.fail("there is no workspace")


def test_a_file_in_place_of_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadFailed, match="cannot be written"), store.workspace():
        pytest.fail("there is no workspace")


def test_a_read_only_cache_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(DownloadFailed, match=r"cannot be written \(Permission denied\)"), store.workspace():
        pytest.fail("there is no workspace")


def test_too_little_room_is_seen_before_the_fetch(cache: Path) -> None:
    free = shutil.disk_usage(cache.parent).free
    with pytest.raises(DownloadFailed, match=r"is full .*bytes are needed"), store.workspace(free * 2):
        pytest.fail("there is no workspace")
    assert list(cache.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(cache: Path) -> None:
    with pytest.raises(DownloadFailed, match="is full"), store.workspace() as folder:
        (folder / "file").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(cache.iterdir()) == []


def test_any_other_trouble_with_the_disk_is_told(cache: Path) -> None:
    with pytest.raises(DownloadFailed, match="failed: .*Input/output error"), store.workspace():
        raise OSError(errno.EIO, "Input/output error")


def test_only_old_workspaces_are_swept(cache: Path) -> None:
    old, young = cache / f"{store.WORKSPACE_PREFIX}old", cache / f"{store.WORKSPACE_PREFIX}young"
    old.mkdir(parents=True)
    young.mkdir()
    long_ago = time.time() - store.STALE_SECONDS - 60
    os.utime(old, (long_ago, long_ago))
    with store.workspace():
        assert not old.exists()
        assert young.exists()


def test_place_replaces_a_file_and_a_folder(cache: Path) -> None:
    target = cache / "models" / "thing"
    for content in ("one", "two"):
        with store.workspace() as folder:
            (folder / "new").write_text(content)
            store.place(folder / "new", target)
        assert target.read_text() == content
    target.unlink()
    for name in ("first", "second"):
        with store.workspace() as folder:
            (folder / "new").mkdir()
            (folder / "new" / name).write_text("x")
            store.place(folder / "new", target)
        assert [path.name for path in target.iterdir()] == [name]
    assert [path.name for path in cache.iterdir()] == ["models"]


def test_check_file_names_what_is_wrong(tmp_path: Path) -> None:
    path, good = tmp_path / "weights", hashlib.sha256(b"abcd").hexdigest()
    path.write_bytes(b"abcd")
    store.check_file(path, 4, good)
    with pytest.raises(DownloadFailed, match="weights arrived truncated: 4 bytes instead of 5"):
        store.check_file(path, 5, good)
    with pytest.raises(DownloadFailed, match="weights arrived too long: 4 bytes instead of 3"):
        store.check_file(path, 3, good)
    with pytest.raises(DownloadFailed, match=f"SHA-256 {good} instead of {'0' * 64}"):
        store.check_file(path, 4, "0" * 64)


def test_copying_reports_progress(tmp_path: Path) -> None:
    data = os.urandom(3 * store.COPY_BYTES // 2)
    seen: list[tuple[str, int, int | None]] = []
    store.copy_stream(io.BytesIO(data), tmp_path / "out", len(data), lambda *report: seen.append(report))
    assert (tmp_path / "out").read_bytes() == data
    assert seen == [
        ("unpacking out", store.COPY_BYTES, len(data)),
        ("unpacking out", len(data), len(data)),
    ]


@pytest.mark.parametrize("total, most", [(3, 3), (None, 6)])
def test_growth_is_reported_while_the_body_runs(tmp_path: Path, total: int | None, most: int) -> None:
    seen: list[tuple[str, int, int | None]] = []
    with store.growth_reported(tmp_path, "growing", total, lambda *report: seen.append(report)):
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "file").write_bytes(b"123456")
        deadline = time.monotonic() + 10
        while (not seen or seen[-1][1] < most) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen[-1] == ("growing", most, total)
    told = len(seen)
    time.sleep(3 * store.POLL_SECONDS)
    assert len(seen) == told


def test_bytes_under_counts_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"345")
    assert store.bytes_under(tmp_path) == 5
    assert store.bytes_under(tmp_path / "a") == 2
    assert store.bytes_under(tmp_path / "nothing") == 0


def test_a_partial_file_stays_and_is_gone_on_with(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt), store.partial("abc", 10) as file:
        file.write(b"12345")
        raise KeyboardInterrupt
    with store.partial("abc", 10) as file:
        assert file.tell() == 5
        file.write(b"67890")
    assert store.partial_path("abc").read_bytes() == b"1234567890"
    with store.partial("abc", 9) as file:
        assert file.tell() == 0
    assert store.partial_path("abc").read_bytes() == b""


def test_only_the_rest_of_a_partial_file_needs_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.partial("abc", 100) as file:
        file.write(bytes(60))
    usage = type("Usage", (), {"free": 50})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with store.partial("abc", 100):
        pass
    with (
        pytest.raises(DownloadFailed, match=r"60 bytes are needed and 50 are free"),
        store.partial("abc", 120),
    ):
        pytest.fail("there is no room")


def test_two_processes_do_not_write_the_same_file(cache: Path) -> None:
    with (
        store.partial("abc", 10),
        pytest.raises(DownloadFailed, match="another process is fetching the same file"),
        store.partial("abc", 10),
    ):
        pytest.fail("it is locked")
    with store.partial("abc", 10):
        pass


def test_abandoned_partial_files_are_swept(cache: Path) -> None:
    for name, age in (("old", store.ABANDONED_SECONDS + 60), ("young", store.STALE_SECONDS + 60)):
        path = store.partial_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12")
        os.utime(path, (time.time() - age,) * 2)
    with store.partial("abc", 10):
        assert not store.partial_path("old").exists()
        assert store.partial_path("young").read_bytes() == b"12"
