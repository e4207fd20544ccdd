// GPU memory statistics and pinned memory.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;
namespace allocator = c10::cuda::CUDACachingAllocator;

extern "C" {

// The layout is that of `RawMemory` in memory.rs.
struct DrumlineMemory {
  int64_t allocated, peak_allocated, reserved, peak_reserved;
  uint64_t free, total;
  int64_t allocations;
};

Message drumline_cuda_memory(int32_t device, DrumlineMemory* found) {
  return guarded([&] {
    // The allocator has no statistics before the first tensor.
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    auto index = static_cast<c10::DeviceIndex>(device);
    auto stats = allocator::getDeviceStats(index);
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    auto [free, total] = allocator::get()->getMemoryInfo(index);
    *found = {stats.allocated_bytes[all].current, stats.allocated_bytes[all].peak, stats.reserved_bytes[all].current,
              stats.reserved_bytes[all].peak, free, total, stats.allocation[all].allocated};
  });
}

Message drumline_cuda_reset_peak(int32_t device) {
  return guarded([&] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    allocator::resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
}

// Returns cached memory to the driver.
Message drumline_cuda_empty_cache() {
  return guarded([&] { allocator::emptyCache(); });
}

// A tensor in pinned memory, with the size and type of `like`.
Message drumline_cuda_pinned_like(const at::Tensor* like, at::Tensor** made) {
  return guarded([&] {
    auto options = like->options().device(at::kCPU).pinned_memory(true);
    *made = new at::Tensor(at::empty(like->sizes(), options));
  });
}

// Pins memory that is owned elsewhere, so that GPUs can access it directly.
Message drumline_cuda_host_register(void* data, size_t bytes) {
  return guarded([&] { C10_CUDA_CHECK(cudaHostRegister(data, bytes, cudaHostRegisterPortable)); });
}

Message drumline_cuda_host_unregister(void* data) {
  return guarded([&] { C10_CUDA_CHECK(cudaHostUnregister(data)); });
}

// The memory of `tensor` is not reused before the current work of `stream` is done.
Message drumline_cuda_record_stream(const at::Tensor* tensor, int64_t id, int32_t device) {
  return guarded([&] {
    tensor->record_stream(c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(device), c10::DeviceType::CUDA));
  });
}

}  // extern "C"
