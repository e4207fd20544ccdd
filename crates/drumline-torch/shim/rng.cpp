// The state of libtorch's default random number generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// A negative number is the CPU, others are GPUs.
at::Generator default_generator(int64_t device) {
  auto place = device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device));
  return at::globalContext().defaultGenerator(place);
}

at::Tensor* state_of(const at::Generator& generator) { return new at::Tensor(generator.get_state()); }

}  // namespace

extern "C" {

Message drumline_rng_num_gpus(int64_t* num) {
  return guarded([&] { *num = at::hasCUDA() ? static_cast<int64_t>(at::getNumGPUs()) : 0; });
}

Message drumline_rng_get(int64_t device, at::Tensor** state) {
  return guarded([&] {
    auto generator = default_generator(device);
    std::scoped_lock lock(generator.mutex());
    *state = state_of(generator);
  });
}

Message drumline_rng_set(int64_t device, at::Tensor* state) {
  return guarded([&] {
    auto generator = default_generator(device);
    std::scoped_lock lock(generator.mutex());
    generator.set_state(*state);
  });
}

// The state of a generator after `seed`. The process's generator does not change.
Message drumline_rng_seeded(int64_t device, uint64_t seed, at::Tensor** state) {
  return guarded([&] {
    auto generator = device < 0 ? at::detail::createCPUGenerator() : default_generator(device).clone();
    generator.set_current_seed(seed);
    *state = state_of(generator);
  });
}

}  // extern "C"
