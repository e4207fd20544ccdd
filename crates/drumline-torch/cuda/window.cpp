// GPU memory that processes share (CUDA IPC), and flags by which their streams wait for each other.
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

using StreamFlag = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// A function of the driver, which the plugin is not linked against.
StreamFlag driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
  TORCH_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no ", name);
  return reinterpret_cast<StreamFlag>(found);
}

void call(StreamFlag function, void* stream, void* flag, uint32_t value, unsigned int how) {
  auto code = function(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(flag), value, how);
  TORCH_CHECK(code == CUDA_SUCCESS, "error ", static_cast<int>(code), " of the driver");
}

}  // namespace

extern "C" {

// New memory, and the handle (64 bytes) by which other processes open it.
Message drumline_cuda_window_new(int32_t device, size_t bytes, void** data, void* handle) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    C10_CUDA_CHECK(cudaMalloc(data, bytes));
    cudaIpcMemHandle_t made;
    if (auto code = cudaIpcGetMemHandle(&made, *data); code != cudaSuccess) {
      cudaFree(*data);
      C10_CUDA_CHECK(code);
    }
    std::memcpy(handle, &made, sizeof made);
  });
}

Message drumline_cuda_window_open(int32_t device, const void* handle, void** data) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    cudaIpcMemHandle_t known;
    std::memcpy(&known, handle, sizeof known);
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(data, known, cudaIpcMemLazyEnablePeerAccess));
  });
}

Message drumline_cuda_window_free(int32_t device, void* data) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    C10_CUDA_CHECK(cudaFree(data));
  });
}

Message drumline_cuda_window_close(int32_t device, void* data) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    C10_CUDA_CHECK(cudaIpcCloseMemHandle(data));
  });
}

// The bytes as a tensor, which does not own them.
Message drumline_cuda_window_tensor(int32_t device, void* data, int64_t bytes, at::Tensor** made) {
  return guarded([&] {
    auto place = c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    auto options = at::TensorOptions().dtype(at::kByte).device(place);
    *made = new at::Tensor(at::for_blob(data, {bytes}).options(options).target_device(place).make_tensor());
  });
}

// The address by which a GPU uses pinned host memory.
Message drumline_cuda_pinned_address(void* host, void** device) {
  return guarded([&] { C10_CUDA_CHECK(cudaHostGetDevicePointer(device, host, 0)); });
}

// Later work of the stream waits until the flag has at least this value.
Message drumline_cuda_flag_wait(void* stream, void* flag, uint32_t value) {
  return guarded([&] {
    static const auto wait = driver_function("cuStreamWaitValue32");
    call(wait, stream, flag, value, CU_STREAM_WAIT_VALUE_GEQ);
  });
}

// The flag gets this value after the current work of the stream.
Message drumline_cuda_flag_write(void* stream, void* flag, uint32_t value) {
  return guarded([&] {
    static const auto write = driver_function("cuStreamWriteValue32");
    call(write, stream, flag, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  });
}

}  // extern "C"
