"""C++ kernels, which pyproject.toml cannot declare. Without them Quire works, only slower."""

from glob import glob

from setuptools import Extension, setup

KERNELS = "src/quire/kernels/cpu"

setup(
    ext_modules=[
        Extension(
            "quire.kernels._native",
            sorted(glob(f"{KERNELS}/*.cpp")),
            depends=sorted(glob(f"{KERNELS}/*.h")),
            language="c++",
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-Wno-psabi", "-Wno-maybe-uninitialized"],
            # Without a compiler the installation goes on; `quire capabilities` says so.
            optional=True,
        )
    ]
)
