"""Facts about the machine and the software that a measurement depends on."""

import os
import platform
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kakeya
from kakeya.config import REMOTE, ProposerChoice, split_proposers

_CPUINFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, object]:
    """Processor, memory, system and versions, plus how busy the machine was at this moment."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "kakeya": kakeya.__version__,
        "load_average": list(os.getloadavg()),
    }


def memory_bytes() -> int:
    """What the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def public_name(model: str) -> str:
    """A model as reports name it: of a path only its end, since reports are for strangers."""
    return Path(model).name if Path(model).exists() else model


def public_proposers(written: str) -> str:
    """Proposers as reports name them: of paths only the ends, and no addresses."""
    written = re.sub(r"remote:[^,+]+(,[^,+:]+:\d+)*", REMOTE, written)
    lists = [split_proposers(each) for each in written.split(",")]
    return ",".join("+".join(map(_public_choice, choices)) for choices in lists)


def _public_choice(choice: ProposerChoice) -> str:
    return str(replace(choice, path=public_name(choice.path)) if choice.path else choice)


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name as the system gives it."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores this process may run on, which a container may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
