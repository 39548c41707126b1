"""What gpu.py and `sglang-ft doctor` find, with a driver of our own in the place of NVIDIA's."""

import os
import subprocess
import sys

import pytest

DRIVER = """
#include <stdio.h>
extern "C" {{
int cuInit(unsigned) {{ return {init}; }}
int cuDriverGetVersion(int* version) {{ *version = 12040; return 0; }}
int cuDeviceGetCount(int* count) {{ *count = {count}; return 0; }}
int cuDeviceGet(int* device, int index) {{ *device = index; return 0; }}
int cuDeviceGetName(char* name, int size, int device) {{ snprintf(name, size, "Model %d", device); return 0; }}
int cuDeviceGetPCIBusId(char* text, int size, int device) {{ snprintf(text, size, "bus %d", device); return 0; }}
int cuDeviceTotalMem_v2(unsigned long* bytes, int) {{ *bytes = 24ul << 30; return 0; }}
int cuDeviceGetAttribute(int* value, int attribute, int) {{ *value = attribute == 75 ? {major} : 6; return 0; }}
}}
"""
MANAGEMENT = """
#include <string.h>
extern "C" {{
int nvmlInit_v2() {{ return 0; }}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {{ *device = 0; return strcmp(bus, "bus 0"); }}
int nvmlDeviceGetMemoryInfo(void*, unsigned long long* memory) {{
  memory[0] = 24ull << 30; memory[1] = 7ull << 30; memory[2] = 17ull << 30;
  return {status};
}}
}}
"""
FREE = "from sglang_ft import gpu; print(gpu.free_bytes() >> 30)"
FOUND = "from sglang_ft import gpu; print(gpu.found(), gpu.driver_cuda(), gpu.what_is_missing(), sep='|')"
DOCTOR = """
import sys
from sglang_ft.cli import doctor
from sglang_ft.config import FtConfig
from sglang_ft.errors import FtError
try:
    print("ok", doctor._gpu(FtConfig(platform=sys.argv[1])))
except FtError as e:
    print("PROBLEM", e)
"""


@pytest.fixture
def run(tmp_path):
    """Runs Python code that finds the given driver and no kernels, or kernels that hold nothing."""

    def build(library, source):
        (tmp_path / "source.cpp").write_text(source)
        command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", tmp_path / library]
        subprocess.run([*command, tmp_path / "source.cpp"], check=True)

    def run(code, *argv, init=0, count=1, major=8, kernels=False, management=None):
        build("libcuda.so.1", DRIVER.format(init=init, count=count, major=major))
        if management is not None:
            build("libnvidia-ml.so.1", MANAGEMENT.format(status=management))
        if kernels:
            (tmp_path / "libsgl_ft_kernel.so").touch()
        env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "SGLANG_FT_KERNEL_DIR": str(tmp_path)}
        command = [sys.executable, "-c", code, *argv]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    return run


def test_gpus_are_described_and_missing_kernels_named(run):
    gpus, cuda, missing = run(FOUND, count=2).split("|")
    same = f"capability=(8, 6), nbytes={24 << 30})"
    assert gpus == f"(Gpu(name='Model 0', {same}, Gpu(name='Model 1', {same})"
    assert cuda == "(12, 4)"
    assert missing.startswith("the CUDA kernels are not installed: pip install ./sgl-ft-kernel ")


def test_free_memory_is_the_management_library_s_where_there_is_one(run):
    assert [run(FREE), run(FREE, management=0), run(FREE, management=3)] == ["24", "7", "24"]


def test_nothing_is_missing_with_kernels(run):
    assert run(FOUND, kernels=True).endswith("(12, 4)|")


@pytest.mark.parametrize("driver", [{"init": 100}, {"count": 0}])
def test_a_driver_without_a_gpu(run, driver):
    gpus, _, missing = run(FOUND, kernels=True, **driver).split("|")
    assert (gpus, missing) == ("()", "no NVIDIA GPU with a working driver was found")


def test_a_gpu_that_the_kernels_are_not_compiled_for(run):
    assert run(FOUND, major=7, kernels=True).endswith(
        "|Model 0 has compute capability 7.6, the kernels need 8.0"
    )


def test_doctor_says_what_is_missing_and_what_still_works(run):
    text = run(DOCTOR, "auto")
    assert text.startswith("PROBLEM Model 0: the CUDA kernels are not installed: pip install ./sgl-ft-kernel")
    assert text.endswith("Until then everything is served on the CPU")


def test_doctor_sees_a_driver_that_is_too_old_for_torch(run):
    text = run(DOCTOR, "auto", kernels=True)
    assert text.startswith("PROBLEM Model 0: torch 2.11.0")
    assert "the driver knows 12.4. A newer driver mends that" in text


def test_doctor_minds_no_gpu_that_is_not_wanted(run):
    assert run(DOCTOR, "cpu") == "ok not wanted (--ft-platform cpu): attention and experts run on the CPU"
