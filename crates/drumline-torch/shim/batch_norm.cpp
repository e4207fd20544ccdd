// The sums for the backward of batch normalisation, by a kernel of libtorch that tch does not expose.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/native_batch_norm_backward.h>

#include <utility>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// On a GPU the other kernel returns no sums without a weight. This one needs both tensors in the same memory order, and
// returns sum(grad) and sum(grad * (input - mean)).
std::pair<at::Tensor, at::Tensor> sums_on_gpu(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd) {
  auto format = input.suggest_memory_format();
  auto dy = grad.to(input.scalar_type()).contiguous(format);
  auto sums = at::batch_norm_backward_reduce(dy, input.contiguous(format), mean, invstd, {}, /*input_g=*/true, /*weight_g=*/false, /*bias_g=*/false);
  return {std::get<1>(sums).mul(invstd), std::get<0>(sums)};
}

}  // namespace

extern "C" {

Message drumline_batch_norm_sums(at::Tensor* grad, at::Tensor* input, at::Tensor* mean, at::Tensor* invstd, at::Tensor** by_weight, at::Tensor** by_bias) {
  return guarded([&] {
    // The kernel divides by the number of values.
    TORCH_CHECK(input->numel() > 0, "a batch without elements has no sums");
    at::NoGradGuard no_grad;
    if (input->is_cuda()) {
      auto [weight, bias] = sums_on_gpu(*grad, *input, *mean, *invstd);
      *by_weight = new at::Tensor(weight);
      *by_bias = new at::Tensor(bias);
      return;
    }
    auto sums = at::native_batch_norm_backward(*grad, *input, {}, {}, {}, *mean, *invstd, /*train=*/true, /*eps=*/0.0, {false, true, true});
    *by_weight = new at::Tensor(std::get<1>(sums));
    *by_bias = new at::Tensor(std::get<2>(sums));
  });
}

}  // extern "C"
