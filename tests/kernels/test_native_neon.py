"""The kernels for ARM, cross-compiled and run by an emulator."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = Path(__file__).parents[2] / "src/kakeya/kernels/src"
CHECKS = Path(__file__).parent / "native/instruction_sets.cpp"
FLAGS = ["-O1", "-std=c++17", "-ffp-contract=off", "-Wno-psabi", "-pthread", f"-I{SOURCES}"]
# The door to Python, and other processors' kernels.
LEFT_OUT = ("bindings.cpp", "ops_avx2.cpp", "ops_avx512.cpp")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("neon")
    sources = [CHECKS, *(path for path in sorted(SOURCES.glob("*.cpp")) if path.name not in LEFT_OUT)]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    built = folder / "instruction_sets"
    subprocess.run([COMPILER, "-static", "-pthread", *objects, "-o", built], check=True)
    return built


def compile_one(source: Path, target: Path) -> None:
    subprocess.run([COMPILER, *FLAGS, "-c", source, "-o", target], check=True)


def emulated(program: Path, processor: str, isa: str) -> subprocess.CompletedProcess[str]:
    command = [EMULATOR, "-cpu", processor, str(program), isa]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("isa", ["neon-dotprod", "generic"])
def test_every_operation_is_right_on_arm(program: Path, isa: str) -> None:
    done = emulated(program, "max", isa)
    assert (done.returncode, done.stdout) == (0, f"{isa}: 0 wrong\n"), done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_a_processor_without_dot_products_is_not_given_them(program: Path) -> None:
    done = emulated(program, "cortex-a53", "neon-dotprod")
    assert (done.returncode, done.stdout) == (2, "this machine cannot run the kernels for neon-dotprod\n")
