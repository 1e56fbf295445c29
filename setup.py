"""C++ kernels, which pyproject.toml cannot declare. Without them Quire works, only slower."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = "src/quire/kernels/cpu"


class BuildInParallel(build_ext):
    """Compiles as many files at a time as there are cores; one alone takes minutes for all."""

    def build_extensions(self):
        compile_some = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(partial(compile_one, options), sources)
                return [name for names in made for name in names]

        def compile_one(options, source):
            return compile_some([source], **options)

        self.compiler.compile = compile_all
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[
        Extension(
            "quire.kernels._native",
            sorted(glob(f"{KERNELS}/*.cpp")),
            depends=sorted(glob(f"{KERNELS}/*.h")),
            language="c++",
            # Some Pythons give -fwrapv themselves; loops over states are slower without.
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-fwrapv", "-Wno-psabi", "-Wno-maybe-uninitialized"],
            # Without a compiler the installation goes on; `quire capabilities` says so.
            optional=True,
        )
    ],
)
