// Gradients: hooks that run when one has been accumulated; set, taken, made undefined.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "callback.h"

using drumline::guarded;
using drumline::Message;

namespace {

struct Hook : torch::autograd::PostAccumulateGradHook {
  explicit Hook(drumline::Closure closure) : callback(closure) {}
  void operator()(const torch::autograd::Variable&) override { callback(); }
  drumline::Callback callback;
};

}  // namespace

extern "C" {

Message drumline_hook_set(at::Tensor* leaf, drumline::Closure closure) {
  return guarded([&] {
    auto hook = std::make_unique<Hook>(closure);
    TORCH_CHECK(leaf->is_leaf() && leaf->requires_grad(), "a hook on gradients needs a leaf that requires them");
    torch::autograd::impl::set_post_acc_grad_hooks(*leaf, std::move(hook));
  });
}

Message drumline_hook_clear(at::Tensor* leaf) {
  return guarded([&] { torch::autograd::impl::set_post_acc_grad_hooks(*leaf, nullptr); });
}

// A null or undefined `grad` makes the gradient undefined.
Message drumline_grad_set(at::Tensor* leaf, at::Tensor* grad) {
  return guarded([&] { leaf->mutable_grad() = grad == nullptr ? at::Tensor() : *grad; });
}

Message drumline_grad_take(at::Tensor* leaf, at::Tensor** grad) {
  return guarded([&] {
    auto& held = leaf->mutable_grad();
    *grad = held.defined() ? new at::Tensor(std::move(held)) : nullptr;
    held = at::Tensor();
  });
}

Message drumline_grad_into(at::Tensor* leaf, at::Tensor* place, bool* had_one) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto& held = leaf->mutable_grad();
    *had_one = held.defined();
    if (!held.defined() || held.unsafeGetTensorImpl() == place->unsafeGetTensorImpl()) return;
    place->copy_(held.is_sparse() ? held.to_dense() : held);
    held = *place;
  });
}

Message drumline_grad_get(at::Tensor* leaf, at::Tensor** grad) {
  return guarded([&] {
    auto& held = leaf->mutable_grad();
    *grad = held.defined() ? new at::Tensor(held) : nullptr;
  });
}

}  // extern "C"
