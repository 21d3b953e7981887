"""The one thing pyproject.toml cannot say: spanformer/ops/_kernel.so is built by csrc/build.py, for any Python."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("spanformer_build", HERE / "csrc" / "build.py")
assert spec is not None and spec.loader is not None
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)


class BuildKernel(build_ext):
    """Leaves the compiling to csrc/build.py; a failure is told loudly and does not stop the installation."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))  # no Python version in the name: it links to none

    def build_extension(self, ext: Extension) -> None:
        try:
            kernel.build(Path(self.get_ext_fullpath(ext.name)))
        except kernel.BuildError as error:
            (HERE / "src" / self.get_ext_filename(ext.name)).unlink(missing_ok=True)  # an older one, not to be used
            kernel.warn(error)


class AnyPython3(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    # optional: setuptools goes on when the file is not there
    ext_modules=[Extension("spanformer.ops._kernel", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython3},
)
