// Settings of libtorch that tch does not reach.
#include <ATen/Context.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

extern "C" {

Message drumline_flush_denormal(bool on, bool* supported) {
  return guarded([&] { *supported = at::globalContext().setFlushDenormal(on); });
}

Message drumline_deterministic(bool on, bool warn_only) {
  return guarded([&] { at::globalContext().setDeterministicAlgorithms(on, warn_only); });
}

}  // extern "C"
