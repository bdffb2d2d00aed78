"""Builds and installs tvm_fusion: the Python package, ``schedules/`` inside it, the native core."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Read, not imported: the build environment has none of the package's requirements.
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "tvm_fusion/_version.py").read_text(), re.MULTILINE
)[1]

REQUIRES = [
    "apache-tvm==0.27.0.post1",
    # 0.1.15.post2 crashes in the structural hash as soon as meta-schedule tunes.
    "apache-tvm-ffi==0.1.14.post0",
    "numpy",
    "xgboost",
    "cloudpickle",
    "psutil",
    "typer>=0.15",
    "rich",
    "jinja2>=3",
]

EXTRAS = {
    "onnx": ["onnx", "onnxruntime", "onnxsim"],
    "torch": ["torch>=2.6"],
    # NVRTC and NVCC wheels: compile CUDA code and read register counts without a CUDA toolkit.
    "cuda": [
        "cuda-bindings==13.*",
        "nvidia-cuda-nvrtc==13.*",
        "nvidia-cuda-nvcc==13.*",
        "nvidia-cuda-runtime==13.*",
        "nvidia-cuda-cccl==13.*",
    ],
    "rpc": ["tornado"],
    "tutorials": ["ipykernel", "jupytext", "matplotlib", "nbclient", "nbformat"],
    # Pinned: make docs takes a warning for an error, and releases differ in what they warn of.
    "docs": [
        "mkdocs==1.6.1",
        "mkdocs-material==9.8.2",
        "mkdocstrings[python]==1.0.8",
        "nbconvert==7.17.2",
    ],
    "dev": [
        "build",
        # Formatters change their mind between releases.
        "clang-format==18.1.8",
        "hypothesis",
        "mypy==2.4.*",
        "pytest",
        # For tests of machine code.
        "nvidia-cuda-nvdisasm",
        "pytest-xdist",
        "ruff==0.17.*",
        "setuptools>=77",
        "cmake>=3.18",
        "ninja",
        # For tests of tuning over TVM's RPC.
        "tornado",
    ],
}


class CMakeBuild(build_ext):
    """Builds the native core through CMakeLists.txt."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without Python's ABI tag: it does not use Python's C API."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Configure and build in a fresh folder: a cache of an earlier isolated build names tools
        that pip has removed since."""
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        work = Path(self.build_temp).resolve() / "cmake"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        cmake = shutil.which("cmake")
        if cmake is None:
            raise RuntimeError("cmake is missing; install it with: pip install cmake ninja")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        options = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={library.parent}",
        ]
        subprocess.run([cmake, "-S", ROOT, "-B", work, *generator, *options], check=True)
        subprocess.run([cmake, "--build", work, "--parallel", "2"], check=True)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform but for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return (python, abi, platform)."""
        return "py3", "none", super().get_tag()[2]


setup(
    name="tvm_fusion",
    version=VERSION,
    description="Operator fusion for Apache TVM, planned, verified and explained",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    packages=[
        *find_packages(include=["tvm_fusion", "tvm_fusion.*"]),
        "tvm_fusion.schedules",
        *(f"tvm_fusion.schedules.{name}" for name in find_packages("schedules")),
    ],
    package_dir={"tvm_fusion.schedules": "schedules"},
    package_data={
        "tvm_fusion": ["py.typed"],
        "tvm_fusion.report": ["templates/*"],
        "tvm_fusion.tuning": ["records/*.jsonl"],
    },
    ext_modules=[Extension("tvm_fusion._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
    entry_points={"console_scripts": ["tvm-fusion = tvm_fusion.cli:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Topic :: Software Development :: Compilers",
    ],
)
