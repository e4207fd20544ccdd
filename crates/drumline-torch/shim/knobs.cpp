// Settings of libtorch that tch does not expose.
#include <ATen/Context.h>
#include <c10/util/env.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

extern "C" {

Message drumline_flush_denormal(bool on, bool* supported) {
  return guarded([&] { *supported = at::globalContext().setFlushDenormal(on); });
}

Message drumline_deterministic(bool on, bool warn_only) {
  return guarded([&] {
    // libtorch requires this setting of cuBLAS for deterministic matrix products on GPUs.
    if (on) c10::utils::set_env("CUBLAS_WORKSPACE_CONFIG", ":4096:8", false);
    at::globalContext().setDeterministicAlgorithms(on, warn_only);
  });
}

Message drumline_allow_tf32(bool on) {
  return guarded([&] {
    at::globalContext().setAllowTF32CuDNN(on);
    at::globalContext().setAllowTF32CuBLAS(on);
  });
}

}  // extern "C"
