// Work that is recorded once and launched as a whole.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>

#include "status.h"

using at::cuda::CUDAGraph;
using drumline::guarded;
using drumline::Message;

namespace {

// Goes on with the same numbers in a state that knows of no recording.
void renew_generator(c10::DeviceIndex device) {
  const auto& generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto renewed = at::make_generator<at::CUDAGeneratorImpl>(device);
  renewed.set_current_seed(generator.current_seed());
  auto* old = at::check_generator<at::CUDAGeneratorImpl>(generator);
  at::check_generator<at::CUDAGeneratorImpl>(renewed)->set_philox_offset_per_thread(old->philox_offset_per_thread());
  at::Generator(generator).graphsafe_set_state(renewed);
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

Message drumline_cuda_graph_new(CUDAGraph** made) {
  return guarded([&] { *made = new CUDAGraph(); });
}

void drumline_cuda_graph_free(CUDAGraph* graph) { delete graph; }

// What this thread puts on the current stream from now on is recorded and not run. Other threads may go on working with the GPU.
Message drumline_cuda_graph_begin(CUDAGraph* graph, DrumlinePool pool) {
  return guarded([&] { graph->capture_begin({pool.first, pool.second}, cudaStreamCaptureModeThreadLocal); });
}

// Where the recording was spoilt, libtorch leaves its allocator and its generator waiting for the end: they are freed from that.
Message drumline_cuda_graph_end(CUDAGraph* graph, DrumlinePool pool) {
  return guarded([&] {
    try {
      graph->capture_end();
    } catch (...) {
      auto device = c10::cuda::current_device();
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device, {pool.first, pool.second});
      renew_generator(device);
      throw;
    }
  });
}

Message drumline_cuda_graph_replay(CUDAGraph* graph) {
  return guarded([&] { graph->replay(); });
}

}  // extern "C"
