// The sums that the backward of batch normalisation needs, by libtorch's own kernel, which tch leaves out.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/native_batch_norm_backward.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

extern "C" {

Message drumline_batch_norm_sums(at::Tensor* grad, at::Tensor* input, at::Tensor* mean, at::Tensor* invstd, at::Tensor** by_weight, at::Tensor** by_bias) {
  return guarded([&] {
    // The kernel divides by the number of values.
    TORCH_CHECK(input->numel() > 0, "a batch without elements has no sums");
    at::NoGradGuard no_grad;
    auto sums = at::native_batch_norm_backward(*grad, *input, {}, {}, {}, *mean, *invstd, /*train=*/true, /*eps=*/0.0, {false, true, true});
    *by_weight = new at::Tensor(std::get<1>(sums));
    *by_bias = new at::Tensor(std::get<2>(sums));
  });
}

}  // extern "C"
