// Loss scaling: unscales gradients, looks for infinite values and NaN, and updates the scale.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>

#include <map>

#include "list.h"
#include "status.h"

using drumline::guarded;
using drumline::List;
using drumline::Message;

extern "C" {

// Multiplies the gradients by `inv_scale` and sets `found_inf` to 1 if one of their elements is infinite or NaN.
Message drumline_amp_unscale(List grads, at::Tensor* found_inf, at::Tensor* inv_scale) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    // The kernel needs lists of one type.
    std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
    for (const auto& grad : grads.tensors()) {
      TORCH_CHECK(grad.device() == found_inf->device(), "a gradient is on ", grad.device(), ", the loss scale on ",
                  found_inf->device());
      by_type[grad.scalar_type()].push_back(grad);
    }
    for (const auto& of_type : by_type) {
      at::_amp_foreach_non_finite_check_and_unscale_(of_type.second, *found_inf, *inv_scale);
    }
  });
}

// The layout is that of `Growth` in ffi.rs.
struct Growth {
  double growth_factor, backoff_factor;
  int64_t growth_interval;
};

Message drumline_amp_update_scale(at::Tensor* scale, at::Tensor* growth_tracker, at::Tensor* found_inf, Growth growth) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    at::_amp_update_scale_(*scale, *growth_tracker, *found_inf, growth.growth_factor, growth.backoff_factor, growth.growth_interval);
  });
}

}  // extern "C"
