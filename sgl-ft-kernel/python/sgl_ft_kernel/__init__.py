"""The CUDA kernels of sglang_ft's expert cache: one C library beside this file. sglang_ft.kernels calls it."""

from pathlib import Path

LIBRARY = Path(__file__).with_name("libsgl_ft_kernel.so")
