"""Loading the kernels: what is said when they are missing or not those that this package was written for."""

import ctypes
import os
import subprocess

import pytest

from sglang_ft import kernels
from sglang_ft.kernels import KernelError, abi

HOST = "libsgl_ft_plan_host.so"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the kernels are looked for; empty at first."""
    monkeypatch.setenv("SGLANG_FT_KERNEL_DIR", str(tmp_path))
    for cached in (kernels.library, kernels.host_library):
        cached.cache_clear()
    yield tmp_path
    for cached in (kernels.library, kernels.host_library):
        cached.cache_clear()


def compile_library(path, sizes):
    """A library whose structs have these sizes."""
    source = path.with_suffix(".cpp")
    source.write_text(
        f"static const unsigned long long all[] = {{{', '.join(map(str, sizes))}}};\n"
        'extern "C" int ft_abi_sizes(unsigned long long* sizes, int capacity) {\n'
        f"  for (int i = 0; i < {len(sizes)} && i < capacity; i++) sizes[i] = all[i];\n"
        f"  return {len(sizes)};\n}}\n"
    )
    subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", path, source], check=True)


def test_missing_kernels_are_named_with_folder_and_cure(folder):
    assert not kernels.is_built()
    with pytest.raises(
        KernelError, match=rf"libsgl_ft_kernel\.so is not in {folder}; pip install ./sgl-ft-kernel"
    ):
        kernels.library()
    with pytest.raises(KernelError, match=rf"{HOST} is not in {folder}; build it: cmake"):
        kernels.host_library()


def test_without_any_package_it_says_so(monkeypatch):
    monkeypatch.delenv("SGLANG_FT_KERNEL_DIR", raising=False)
    if kernels.is_built():
        pytest.skip("the kernels are installed in this environment")
    kernels.host_library.cache_clear()
    with pytest.raises(KernelError, match="is not in any package sgl_ft_kernel"):
        kernels.host_library()


def test_a_library_of_the_same_structs_is_taken(folder):
    compile_library(folder / HOST, [ctypes.sizeof(struct) for struct in abi.STRUCTS])
    assert kernels.host_library().ft_abi_sizes.restype is ctypes.c_int


@pytest.mark.parametrize("change", ["grown", "one more", "one fewer"])
def test_a_library_of_other_structs_is_refused(folder, change):
    sizes = [ctypes.sizeof(struct) for struct in abi.STRUCTS]
    if change == "grown":
        sizes[3] += 8
    compile_library(
        folder / HOST, sizes + [8] if change == "one more" else sizes[: -(change == "one fewer") or None]
    )
    with pytest.raises(KernelError, match=f"{HOST} was built from other sources.*install both again"):
        kernels.host_library()


def test_a_file_that_is_no_library_is_one_message(folder):
    (folder / HOST).write_text("not an ELF file")
    with pytest.raises(KernelError, match=f"{HOST} cannot be loaded"):
        kernels.host_library()
