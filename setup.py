"""Builds the native kernels with the package. Everything else about the package is in pyproject.toml.

The extension is optional: where no compiler works, the package installs without it and runs on torch.
KAKEYA_REQUIRE_NATIVE=1 makes that an error, for wheels that others install.
"""

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

SOURCES = "src/kakeya/kernels/src"

native = Pybind11Extension(
    "kakeya.kernels._native",
    sorted(glob(f"{SOURCES}/*.cpp")),
    depends=sorted(glob(f"{SOURCES}/*.h")),
    cxx_std=17,
    # No -march: the kernels choose their instructions at run time. No contraction: a row's bits must not
    # depend on which multiplications and additions a compiler happens to fuse. Python asks for debug
    # information, which takes a third of the time.
    extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-pthread", "-Wno-maybe-uninitialized"],
    extra_link_args=["-pthread"],
    optional=os.environ.get("KAKEYA_REQUIRE_NATIVE") != "1",
)

# One file per core at a time.
with ParallelCompile():
    setup(ext_modules=[native])
