// The two gradients of a convolution, computed separately.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution_backward.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

extern "C" {

// The layout is that of `Arguments` in convolution.rs.
struct DrumlineConvolution {
  int64_t stride, padding, groups;
  bool of_input, of_weight;
};

// Returns new handles, or null for gradients that are not needed.
Message drumline_convolution_backward(const at::Tensor* grad, const at::Tensor* input, const at::Tensor* weight, DrumlineConvolution with,
                                      at::Tensor** of_input, at::Tensor** of_weight) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    int64_t stride[] = {with.stride, with.stride}, padding[] = {with.padding, with.padding}, ones[] = {1, 1}, zeros[] = {0, 0};
    auto [first, second, bias] = at::convolution_backward(*grad, *input, *weight, std::nullopt, stride, padding, ones, false, zeros, with.groups,
                                                          {with.of_input, with.of_weight, false});
    if (with.of_input) *of_input = new at::Tensor(first);
    if (with.of_weight) *of_weight = new at::Tensor(second);
  });
}

}  // extern "C"
