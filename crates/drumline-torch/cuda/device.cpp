// The GPUs of this machine, from the CUDA runtime.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstdio>

#include "status.h"

using drumline::guarded;
using drumline::Message;

extern "C" {

// The layout is that of `RawProperties` in properties.rs.
struct DrumlineDeviceProperties {
  char name[256];
  char pci_bus_id[32];
  int32_t major, minor, multiprocessors, clock_khz;
  uint64_t total_memory, l2_cache, shared_memory_per_block;
};

Message drumline_cuda_device_count(int32_t* count) {
  return guarded([&] { *count = c10::cuda::device_count_ensure_non_zero(); });
}

Message drumline_cuda_versions(int32_t* driver, int32_t* runtime) {
  return guarded([&] {
    C10_CUDA_CHECK(cudaDriverGetVersion(driver));
    C10_CUDA_CHECK(cudaRuntimeGetVersion(runtime));
  });
}

Message drumline_cuda_properties(int32_t device, DrumlineDeviceProperties* found) {
  return guarded([&] {
    cudaDeviceProp properties;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    std::snprintf(found->name, sizeof found->name, "%s", properties.name);
    C10_CUDA_CHECK(cudaDeviceGetPCIBusId(found->pci_bus_id, sizeof found->pci_bus_id, device));
    found->major = properties.major;
    found->minor = properties.minor;
    found->multiprocessors = properties.multiProcessorCount;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&found->clock_khz, cudaDevAttrClockRate, device));
    found->total_memory = properties.totalGlobalMem;
    found->l2_cache = static_cast<uint64_t>(properties.l2CacheSize);
    found->shared_memory_per_block = properties.sharedMemPerBlockOptin;
  });
}

Message drumline_cuda_can_access_peer(int32_t device, int32_t peer, bool* can) {
  return guarded([&] {
    int answer = 0;
    C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&answer, device, peer));
    *can = answer != 0;
  });
}

// Makes it the current device of this thread, and returns the previous one.
Message drumline_cuda_exchange_device(int32_t device, int32_t* before) {
  return guarded([&] { *before = c10::cuda::ExchangeDevice(static_cast<c10::DeviceIndex>(device)); });
}

// Sets the current device of this thread.
Message drumline_cuda_set_device(int32_t device) {
  return guarded([&] { c10::cuda::set_device(static_cast<c10::DeviceIndex>(device)); });
}

Message drumline_cuda_synchronize(int32_t device) {
  return guarded([&] {
    c10::cuda::CUDAGuard current(static_cast<c10::DeviceIndex>(device));
    c10::cuda::device_synchronize();
  });
}

}  // extern "C"
