// SPDX-License-Identifier: Apache-2.0
//
// Slot memory behind fixed addresses, and host memory that the device reaches.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "sgl_ft_kernel/api.h"

namespace ft {
namespace {

// Changing hands in 32 MiB pieces takes a fraction of the time that 2 MiB pieces take.
constexpr uint64_t kChunk = uint64_t(32) << 20;

// The driver's functions, found at run time: the library must load where there is no driver.
struct Driver {
  decltype(&cuMemAddressReserve) address_reserve;
  decltype(&cuMemAddressFree) address_free;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  bool complete;
};

template <class Function>
bool find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) != cudaSuccess)
    return false;
  function = reinterpret_cast<Function>(found);
  return result == cudaDriverEntryPointSuccess;
}

const Driver& driver() {
  static const Driver found = [] {
    Driver d{};
    d.complete = find("cuMemAddressReserve", d.address_reserve) && find("cuMemAddressFree", d.address_free) &&
                 find("cuMemCreate", d.create) && find("cuMemRelease", d.release) &&
                 find("cuMemMap", d.map) && find("cuMemUnmap", d.unmap) &&
                 find("cuMemSetAccess", d.set_access);
    return d;
  }();
  return found;
}

cudaError_t runtime_error(CUresult result) {
  switch (result) {
    case CUDA_SUCCESS:
      return cudaSuccess;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return cudaErrorMemoryAllocation;
    case CUDA_ERROR_NOT_SUPPORTED:
      return cudaErrorNotSupported;
    default:
      return cudaErrorInvalidValue;
  }
}

class Range {
 public:
  ~Range() {
    if (!address_) return;
    shrink(0);
    driver().address_free(address_, bytes_);
  }

  CUresult reserve(uint64_t bytes, int device) {
    location_.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location_.id = device;
    bytes_ = (bytes + kChunk - 1) / kChunk * kChunk;
    return driver().address_reserve(&address_, bytes_, 0, 0, 0);
  }

  // All or nothing: what was mapped in vain is unmapped again.
  CUresult resize(uint64_t bytes) {
    size_t wanted = (bytes + kChunk - 1) / kChunk, before = chunks_.size();
    if (wanted * kChunk > bytes_) return CUDA_ERROR_INVALID_VALUE;
    if (wanted < before) return shrink(wanted);
    while (chunks_.size() < wanted) {
      CUresult result = add_chunk();
      if (result == CUDA_SUCCESS) continue;
      shrink(before);
      return result;
    }
    return CUDA_SUCCESS;
  }

  uint64_t address() const { return address_; }
  uint64_t mapped() const { return chunks_.size() * kChunk; }

 private:
  CUresult add_chunk() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location_;
    CUmemGenericAllocationHandle chunk;
    CUresult result = driver().create(&chunk, kChunk, &properties, 0);
    if (result != CUDA_SUCCESS) return result;
    CUdeviceptr at = address_ + chunks_.size() * kChunk;
    CUmemAccessDesc access{location_, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    result = driver().map(at, kChunk, 0, chunk, 0);
    if (result == CUDA_SUCCESS) {
      result = driver().set_access(at, kChunk, &access, 1);
      if (result != CUDA_SUCCESS) driver().unmap(at, kChunk);
    }
    if (result == CUDA_SUCCESS)
      chunks_.push_back(chunk);
    else
      driver().release(chunk);
    return result;
  }

  CUresult shrink(size_t wanted) {
    CUresult first_error = CUDA_SUCCESS;
    while (chunks_.size() > wanted) {
      CUdeviceptr at = address_ + (chunks_.size() - 1) * kChunk;
      CUresult result = driver().unmap(at, kChunk);
      if (result == CUDA_SUCCESS) result = driver().release(chunks_.back());
      if (first_error == CUDA_SUCCESS) first_error = result;
      chunks_.pop_back();
    }
    return first_error;
  }

  CUdeviceptr address_ = 0;
  uint64_t bytes_ = 0;
  CUmemLocation location_{};
  std::vector<CUmemGenericAllocationHandle> chunks_;
};

}  // namespace
}  // namespace ft

extern "C" {

int ft_range_reserve(uint64_t bytes, int device, void** range) {
  if (!ft::driver().complete) return cudaErrorNotSupported;
  cudaError_t ready = cudaFree(nullptr);  // the device's context must exist
  if (ready != cudaSuccess) return ready;
  auto made = std::make_unique<ft::Range>();
  CUresult result = made->reserve(bytes, device);
  if (result != CUDA_SUCCESS) return ft::runtime_error(result);
  *range = made.release();
  return cudaSuccess;
}

int ft_range_resize(void* range, uint64_t bytes) {
  return ft::runtime_error(static_cast<ft::Range*>(range)->resize(bytes));
}

uint64_t ft_range_address(void* range) { return static_cast<ft::Range*>(range)->address(); }
uint64_t ft_range_mapped(void* range) { return static_cast<ft::Range*>(range)->mapped(); }

int ft_range_free(void* range) {
  delete static_cast<ft::Range*>(range);
  return cudaSuccess;
}

int ft_host_register(void* start, uint64_t bytes, uint64_t chunk, uint64_t* registered) {
  for (*registered = 0; *registered < bytes; *registered += std::min(chunk, bytes - *registered)) {
    uint64_t size = std::min(chunk, bytes - *registered);
    cudaError_t result =
        cudaHostRegister(static_cast<char*>(start) + *registered, size, cudaHostRegisterMapped);
    if (result != cudaSuccess) {
      cudaGetLastError();  // it is reported here, not by the next launch
      return result;
    }
  }
  return cudaSuccess;
}

int ft_host_unregister(void* start, uint64_t bytes, uint64_t chunk) {
  cudaError_t first_error = cudaSuccess;
  for (uint64_t at = 0; at < bytes; at += chunk) {
    cudaError_t result = cudaHostUnregister(static_cast<char*>(start) + at);
    if (first_error == cudaSuccess) first_error = result;
  }
  return first_error;
}

int ft_device_address(void* host, void** device) { return cudaHostGetDevicePointer(device, host, 0); }

const char* ft_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
