// Work that is recorded once and launched as a whole.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// libtorch's graph, asked whether it will give its memory back, and by what CUDA knows its recording.
struct Graph : at::cuda::CUDAGraph {
  bool releases_its_pool() const { return capture_ended_; }
  uint64_t recording() const { return capture_id_; }
};

// Goes on with the same numbers in a state that knows of no recording.
void renew_generator(c10::DeviceIndex device) {
  const auto& generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto renewed = at::make_generator<at::CUDAGeneratorImpl>(device);
  renewed.set_current_seed(generator.current_seed());
  auto* old = at::check_generator<at::CUDAGeneratorImpl>(generator);
  at::check_generator<at::CUDAGeneratorImpl>(renewed)->set_philox_offset_per_thread(old->philox_offset_per_thread());
  at::Generator(generator).graphsafe_set_state(renewed);
}

// What must be done however much of it fails.
template <typename F>
bool succeeds(F&& body) {
  try {
    body();
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

extern "C" {

// Memory of graphs that never run at the same time; laid out as `RawPool` in graph.rs.
struct DrumlinePool {
  uint64_t first, second;
};

Message drumline_cuda_pool_new(DrumlinePool* made) {
  return guarded([&] {
    auto [first, second] = at::cuda::graph_pool_handle();
    *made = {first, second};
  });
}

Message drumline_cuda_graph_new(Graph** made) {
  return guarded([&] { *made = new Graph(); });
}

void drumline_cuda_graph_free(Graph* graph) { delete graph; }

// What this thread puts on the current stream from now on is recorded and not run. Other threads may go on working with the GPU.
//
// Where that cannot begin, libtorch leaves what it had begun by then: both allocators count the pool's users, each for itself.
Message drumline_cuda_graph_begin(Graph* graph, DrumlinePool pool, uint64_t* recording) {
  return guarded([&] {
    c10::MempoolId_t id{pool.first, pool.second};
    try {
      graph->capture_begin(id, cudaStreamCaptureModeThreadLocal);
      *recording = graph->recording();
    } catch (...) {
      auto device = c10::cuda::current_device();
      auto* host = at::getHostAllocator(at::kCUDA);
      if (succeeds([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(device, id); })) {
        succeeds([&] { c10::cuda::CUDACachingAllocator::releasePool(device, id); });
      }
      if (succeeds([&] { host->end_allocate_to_pool(id); })) {
        succeeds([&] { host->release_pool(id); });
      }
      renew_generator(device);
      throw;
    }
  });
}

// Where the recording was spoilt, libtorch leaves its allocators and its generator waiting for the end, and the pool with a user: they are freed from that.
Message drumline_cuda_graph_end(Graph* graph, DrumlinePool pool) {
  return guarded([&] {
    c10::MempoolId_t id{pool.first, pool.second};
    try {
      graph->capture_end();
    } catch (...) {
      auto device = c10::cuda::current_device();
      auto* host = at::getHostAllocator(at::kCUDA);
      succeeds([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(device, id); });
      succeeds([&] { host->end_allocate_to_pool(id); });
      if (!graph->releases_its_pool()) {
        succeeds([&] { c10::cuda::CUDACachingAllocator::releasePool(device, id); });
        succeeds([&] { host->release_pool(id); });
      }
      renew_generator(device);
      throw;
    }
  });
}

Message drumline_cuda_graph_replay(Graph* graph) {
  return guarded([&] { graph->replay(); });
}

}  // extern "C"
