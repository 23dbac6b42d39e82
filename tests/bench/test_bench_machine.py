import mmap
import multiprocessing
import os
import time
from pathlib import Path

import pytest

import kakeya
from kakeya.bench.machine import (
    Bystanders,
    cpu_model,
    installed_version,
    machine_facts,
    public_name,
    resident_bytes,
    usable_cores,
)


def test_reports_name_a_model_and_not_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert public_name(str(tmp_path / "m.gguf")) == "m.gguf"
    assert public_name("org/name") == "org/name"


def test_facts_name_machine_and_software() -> None:
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["cores"] == os.cpu_count()
    assert facts["kakeya"] == kakeya.__version__
    assert str(facts["torch"]).startswith("2")
    memory = facts["memory_bytes"]
    assert isinstance(memory, int)
    assert memory > 2**28


def test_cpu_model_comes_from_the_system_or_the_platform(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Fast Chip 9\nmodel name\t: other\n")
    assert cpu_model(listing) == "Fast Chip 9"
    assert cpu_model(tmp_path / "absent")


def test_usable_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == os.cpu_count()


def test_absent_package_has_no_version() -> None:
    assert installed_version("no-such-package-at-all") is None


def test_resident_bytes_follow_an_allocation() -> None:
    size = 2**25
    with mmap.mmap(-1, size) as fresh_pages:
        before = resident_bytes()
        fresh_pages.write(b"x" * size)
        assert resident_bytes() - before > size * 0.9


def test_resident_bytes_are_the_same_by_either_way(tmp_path: Path) -> None:
    assert abs(resident_bytes(tmp_path / "absent") / resident_bytes() - 1) < 0.1


def _proc(root: Path, machine_ticks: int, our_ticks: int) -> Path:
    (root / "7").mkdir(parents=True, exist_ok=True)
    idle = 1000 * machine_ticks
    (root / "stat").write_text(f"cpu  {machine_ticks} 0 0 {idle} {idle} 0 0 0 5 5\ncpu0 1 2 3\n")
    (root / "7" / "stat").write_text(f"7 (a ) name) S 1 1 1 0 -1 0 0 0 0 0 {our_ticks} 0 0 0 20 0\n")
    return root


def test_bystanders_use_what_we_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ticks = os.sysconf("SC_CLK_TCK")
    bystanders = Bystanders([7], _proc(tmp_path, 0, 0))
    _proc(tmp_path, machine_ticks=12 * ticks, our_ticks=8 * ticks)
    assert bystanders.share() == 4 / 20  # 4 of 20 core seconds


def test_bystanders_are_unknown_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert Bystanders([7], tmp_path).share() is None


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_our_own_work_does_not_count_and_that_of_others_does() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(1.2,))
    process.start()
    assert process.pid is not None
    time.sleep(0.4)  # let it come up
    strangers, company = Bystanders([os.getpid()]), Bystanders([os.getpid(), process.pid])
    time.sleep(0.5)
    counted, ignored = strangers.share(), company.share()
    process.join()
    assert counted is not None
    assert ignored is not None
    assert counted > ignored
