"""C++ kernels, which pyproject.toml cannot declare. Without them Quire works, only slower."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "quire.kernels._native",
            ["src/quire/kernels/cpu/low_rank.cpp"],
            language="c++",
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-Wno-psabi"],
            # Without a compiler the installation goes on; `quire capabilities` says so.
            optional=True,
        )
    ]
)
