"""Slots: GPU memory for complete experts behind addresses that never change, and host memory that the GPU reaches."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_ft import kernels
from sglang_ft.errors import MemoryBudgetError
from sglang_ft.experts.registration import Registration, even_borders
from sglang_ft.kernels import check
from sglang_ft.worker.memory import GIB

if TYPE_CHECKING:
    from sglang_ft.experts.formats import LayerSpec
    from sglang_ft.worker.memory import MemoryFile
    from sglang_ft.worker.protocol import Role

_PROBE_BYTES = 4096


class DeviceRange:
    """A reserved range of GPU addresses whose first bytes have memory behind them."""

    def __init__(self, nbytes: int, device: int) -> None:
        self._lib = kernels.library()
        self._range = ctypes.c_void_p()
        check(
            self._lib.ft_range_reserve(nbytes, device, ctypes.byref(self._range)), "reserving GPU addresses"
        )
        self.address: int = self._lib.ft_range_address(self._range)

    @property
    def mapped(self) -> int:
        """Bytes that have memory behind them."""
        return self._lib.ft_range_mapped(self._range)

    def resize(self, nbytes: int) -> None:
        """Maps or unmaps memory so that `nbytes` are there. All or nothing; raises KernelError."""
        check(self._lib.ft_range_resize(self._range, nbytes), f"mapping {nbytes / GIB:.2f} GiB of GPU memory")

    def close(self) -> None:
        """Unmaps everything and gives the addresses back. Tensors over it are dead then."""
        if self._range:
            self._lib.ft_range_free(self._range)
            self._range = ctypes.c_void_p()


class SlotPool:
    """One range a role; slot s of a role lies at s * stride. Resizing moves nothing: slots come and go at the end."""

    def __init__(self, spec: LayerSpec, most: int, device: int) -> None:
        """Addresses for `most` slots of experts like `spec`; none of them has memory yet."""
        self.roles = spec.format.roles(spec)
        self.slots = 0
        self._device = device
        self.ranges = {role: DeviceRange(most * one.nbytes, device) for role, one in self.roles.items()}

    @property
    def expert_bytes(self) -> int:
        return sum(role.nbytes for role in self.roles.values())

    def resize(self, slots: int) -> None:
        """Gives memory to exactly the first `slots` slots. Raises MemoryBudgetError; then nothing has changed."""
        try:
            for role, one in self.roles.items():
                self.ranges[role].resize(slots * one.nbytes)
        except kernels.KernelError as e:
            for role, one in self.roles.items():
                self.ranges[role].resize(self.slots * one.nbytes)
            raise MemoryBudgetError(
                f"{slots} expert slots need {slots * self.expert_bytes / GIB:.2f} GiB of GPU memory (--ft-slots): {e}"
            ) from e
        self.slots = slots

    def view(self, role: Role, first: int, count: int) -> torch.Tensor:
        """Slots [first, first + count) of a role, [count, ...]; valid as long as they have memory."""
        one = self.roles[role]
        address = self.ranges[role].address + first * one.nbytes
        return device_view(address, count * one.nbytes, self._device).view(one.dtype).view(count, *one.shape)

    def close(self) -> None:
        for device_range in self.ranges.values():
            device_range.close()


class RegisteredMemory:
    """A memory file that CUDA copies and kernels reach, as far as the system lets it be pinned."""

    def __init__(self, file: MemoryFile, registration: Registration | None = None) -> None:
        """`registration`: of this file, begun by `register`; else all of it is pinned now."""
        self.file = file
        self._lib = kernels.library()
        registration = registration or register(file, even_borders(file.size))
        self.borders = registration.borders
        self._pinned, self.failure = registration.finish()
        self._usable = self._pinned
        self._verify()

    @property
    def nbytes(self) -> int:
        """Bytes from the start that the device reaches."""
        return self.borders[self._usable]

    def _verify(self) -> None:
        """Copies a little of every piece: some systems (WSL) register memory whose copies never arrive."""
        for piece in range(self._pinned):
            start, end = self.borders[piece : piece + 2]
            ends = (start, max(start, end - _PROBE_BYTES) // 16 * 16)
            # Kernels take the whole for one range of addresses.
            in_line = self.device_address(start) == self.device_address() + start
            if not in_line or not all(self._arrives(at) for at in ends):
                self.failure = "copies of pinned memory do not arrive on the GPU"
                self._give_back_from(piece)
                return

    def _arrives(self, offset: int) -> bool:
        """Whether a kernel and a copy bring what lies at `offset`."""
        source = self.file.bytes[offset : min(offset + _PROBE_BYTES, self.file.size) // 16 * 16]
        by_kernel, by_copy = (torch.full_like(source, 0xA5, device="cuda") for _ in range(2))
        stream = torch.cuda.current_stream().cuda_stream
        address = self.device_address(offset)
        check(
            self._lib.ft_copy_from_host(by_kernel.data_ptr(), address, source.numel(), 1, stream), "self-test"
        )
        by_copy.copy_(source, non_blocking=True)
        return torch.equal(by_kernel.cpu(), source) and torch.equal(by_copy.cpu(), source)

    @property
    def complete(self) -> bool:
        return self.nbytes == self.file.size

    def device_address(self, offset: int = 0) -> int:
        """Where the device sees byte `offset`."""
        device = ctypes.c_void_p()
        start = self.borders[bisect_right(self.borders, offset) - 1]
        check(
            self._lib.ft_device_address(self.file.address + start, ctypes.byref(device)),
            "address of registered memory",
        )
        return (device.value or 0) + offset - start

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Bytes [offset, offset + nbytes) as (begin, end), cut where a registration ends: no copy may cross one."""
        found, end = [], offset + nbytes
        while offset < end:
            border = min(self.borders[bisect_right(self.borders, offset)], end)
            found.append((offset, border))
            offset = border
        return found

    def copy(self, to: torch.Tensor, offset: int) -> None:
        """Enqueues a copy of what lies from byte `offset` on."""
        target = to.view(torch.uint8).flatten()
        for begin, end in self.pieces(offset, target.numel()):
            target[begin - offset : end - offset].copy_(self.file.bytes[begin:end], non_blocking=True)

    def give_back_last(self) -> bool:
        """Gives back the last piece, for other memory that must be pinned; False: there is none."""
        if self._usable == 0:
            return False
        self._give_back_from(self._usable - 1)
        return True

    def _give_back_from(self, piece: int) -> None:
        for begin, end in zip(self.borders[piece : self._pinned], self.borders[piece + 1 :], strict=False):
            self._lib.ft_host_unregister(self.file.address + begin, end - begin, end - begin)
        self._usable = self._pinned = piece

    def close(self) -> None:
        self._give_back_from(0)


def register(file: MemoryFile, borders: list[int], padding: int = 0) -> Registration:
    """Begins to register a file with CUDA, for the current device. Raises KernelError without kernels."""
    lib, device = kernels.library(), torch.cuda.current_device()

    def pin(begin: int, end: int) -> str:
        done = ctypes.c_uint64()
        size = end - begin
        result = lib.ft_host_register(file.address + begin, size, size, ctypes.byref(done))
        return lib.ft_error_text(result).decode() if result else ""

    def unpin(begin: int, end: int) -> None:
        lib.ft_host_unregister(file.address + begin, end - begin, end - begin)

    return Registration(borders, padding, pin, unpin, prepare=lambda: torch.cuda.set_device(device))


@dataclass
class _Bytes:
    """What torch needs to see memory that it did not allocate."""

    __cuda_array_interface__: dict[str, Any]


def device_view(address: int, nbytes: int, device: int) -> torch.Tensor:
    """uint8 [nbytes] over GPU memory that torch did not allocate."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(_Bytes(interface), device=torch.device("cuda", device))
