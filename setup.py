"""What pyproject.toml cannot say: C++ kernels, without which Quire works too, only slower. See quire/kernels/low_rank.py."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "quire.kernels._native",
            ["src/quire/kernels/cpu/low_rank.cpp"],
            language="c++",
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-Wno-psabi"],
            # No compiler: the installation goes on, and `quire capabilities` says that they are missing.
            optional=True,
        )
    ]
)
