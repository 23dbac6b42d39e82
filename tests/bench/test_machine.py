import os
from pathlib import Path

import pytest

import kakeya
from kakeya.bench.machine import (
    cpu_model,
    installed_version,
    machine_facts,
    public_name,
    public_proposers,
    usable_cores,
)


def test_facts_name_machine_and_software() -> None:
    facts = machine_facts()
    assert facts["cpu"]
    assert (facts["cores"], facts["kakeya"]) == (os.cpu_count(), kakeya.__version__)
    assert str(facts["torch"]).startswith("2")
    assert int(str(facts["memory_bytes"])) > 2**28
    assert installed_version("no-such-package-at-all") is None


def test_what_a_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Fast Chip 9\nmodel name\t: other\n")
    assert cpu_model(listing) == "Fast Chip 9"
    assert cpu_model(tmp_path / "absent")
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == os.cpu_count()


def test_reports_name_a_model_and_not_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert public_name(str(tmp_path / "m.gguf")) == "m.gguf"
    assert public_name("org/name") == "org/name"


def test_reports_name_small_models_without_their_directories(tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    small.touch()
    written = f"ngram,ngram+model:{small},model:org/name"
    assert public_proposers(written) == "ngram,ngram+model:small.gguf,model:org/name"
    assert public_proposers(f"drafter,ngram+drafter:{small}") == "drafter,ngram+drafter:small.gguf"
    (tmp_path / "c++").mkdir()
    plus = tmp_path / "c++" / "small+fast.gguf"
    plus.touch()
    assert public_proposers(f"ngram+model:{plus}") == "ngram+model:small+fast.gguf"
    assert public_proposers("none") == "none"


def test_reports_name_no_addresses() -> None:
    assert public_proposers("ngram+remote:a.example:1,b.example:2,model:x") == "ngram+remote,model:x"
