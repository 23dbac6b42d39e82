"""What processes use of the machine: memory, cores, open files."""

import mmap
import os
import resource
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from kakeya.bench.usage import Bystanders, raise_descriptor_limit, resident_bytes


def test_resident_bytes_follow_an_allocation() -> None:
    size = 2**25
    with mmap.mmap(-1, size) as fresh_pages:
        before = resident_bytes() or 0
        fresh_pages.write(b"x" * size)
        assert (resident_bytes() or 0) - before > size * 0.9


def test_a_process_that_is_gone_has_no_memory_and_no_share() -> None:
    process = subprocess.Popen(["sleep", "60"])
    bystanders = Bystanders([process.pid])
    assert bystanders.share() is not None
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert resident_bytes(process.pid) is None  # nobody has waited for it yet
    process.wait()
    assert resident_bytes(process.pid) is None
    assert bystanders.share() is None
    assert Bystanders([os.getpid(), None]).share() is None


def test_bystanders_use_what_we_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    times = namedtuple("times", "user nice system idle iowait guest guest_nice")
    machine, ours = [times(0, 0, 0, 0, 0, 0, 0)], [SimpleNamespace(user=0.0, system=0.0)]
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine[-1])
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(cpu_times=lambda: ours[-1]))
    bystanders = Bystanders([7])
    # Guests are counted among users, and waiting is not work.
    machine.append(times(8, 1, 3, 1000, 500, 2, 1))
    ours.append(SimpleNamespace(user=5.0, system=3.0))
    assert bystanders.share() == 4 / 20  # 4 of 20 core seconds


def test_our_own_work_does_not_count_and_that_of_others_does() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        strangers, company = Bystanders([os.getpid()]), Bystanders([os.getpid(), spinning.pid])
        spinner = psutil.Process(spinning.pid)
        while spinner.cpu_times().user < 0.5:  # beside busy others that takes a while
            time.sleep(0.1)
        counted, ignored = strangers.share(), company.share()
        spinning.kill()
    assert counted is not None
    assert ignored is not None
    assert counted > ignored


def test_the_descriptor_limit_is_raised_and_told() -> None:
    program = (
        "import resource; from kakeya.bench.usage import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); "
        "print(*(raise_descriptor_limit(n)['after'] for n in (32, 128, 4096))); "
        "print(raise_descriptor_limit(10_000)['before'])"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == ["64", "128", "512", "512"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_descriptor_limit(1) == {"wanted": 1, "before": before[0], "after": before[0]}
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
