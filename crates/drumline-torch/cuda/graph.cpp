// CUDA graphs: work that is recorded once and launched as a whole.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// libtorch's graph, with access to its memory pool and to CUDA's id of its recording.
struct Graph : at::cuda::CUDAGraph {
  bool releases_its_pool() const { return capture_ended_; }
  uint64_t recording() const { return capture_id_; }
};

// Continues with the same random numbers in a state without a recording.
void renew_generator(c10::DeviceIndex device) {
  const auto& generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto renewed = at::make_generator<at::CUDAGeneratorImpl>(device);
  renewed.set_current_seed(generator.current_seed());
  auto* old = at::check_generator<at::CUDAGeneratorImpl>(generator);
  at::check_generator<at::CUDAGeneratorImpl>(renewed)->set_philox_offset_per_thread(old->philox_offset_per_thread());
  at::Generator(generator).graphsafe_set_state(renewed);
}

// Runs `body`. Returns false if it throws.
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

// A memory pool of graphs that never run at the same time. The layout is that of `RawPool` in graph.rs.
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

// From now on the work that this thread queues on the current stream is recorded, and does not run. Other threads may
// use the GPU meanwhile.
//
// If the recording cannot begin, libtorch does not undo what it has done so far: both allocators count the pool's
// users.
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

// If the recording failed, libtorch leaves its allocators and its generator in the recording state, and the pool with a
// user. This resets them.
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
