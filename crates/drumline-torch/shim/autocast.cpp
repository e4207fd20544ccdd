// Autocast of the current thread: on or off for a device type, with its dtype.
#include <ATen/autocast_mode.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// The layout is that of `State` in autocast.rs.
struct State {
  bool enabled;
  int8_t dtype;
};

void set(at::DeviceType device, State state) {
  at::autocast::set_autocast_enabled(device, state.enabled);
  at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(state.dtype));
}

}  // namespace

extern "C" {

// A negative `state.dtype` keeps the current dtype.
Message drumline_autocast_enter(int8_t device, State state, State* before) {
  return guarded([&] {
    auto type = static_cast<at::DeviceType>(device);
    *before = {at::autocast::is_autocast_enabled(type), static_cast<int8_t>(at::autocast::get_autocast_dtype(type))};
    if (state.dtype < 0) state.dtype = before->dtype;
    set(type, state);
    at::autocast::increment_nesting();
  });
}

// Cast weights are cached only until the outermost scope ends.
Message drumline_autocast_leave(int8_t device, State before) {
  return guarded([&] {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set(static_cast<at::DeviceType>(device), before);
  });
}

Message drumline_autocast_state(int8_t device, State* state) {
  return guarded([&] {
    auto type = static_cast<at::DeviceType>(device);
    *state = {at::autocast::is_autocast_enabled(type), static_cast<int8_t>(at::autocast::get_autocast_dtype(type))};
  });
}

}  // extern "C"
