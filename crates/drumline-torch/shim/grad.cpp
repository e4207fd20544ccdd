// Gradients: hooks that run when one was accumulated; set, take, make undefined. Also: reports writes to autograd.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>

#include "callback.h"
#include "list.h"

using drumline::guarded;
using drumline::Message;

namespace {

struct Hook : torch::autograd::PostAccumulateGradHook {
  explicit Hook(drumline::Closure closure) : callback(closure) {}
  void operator()(const torch::autograd::Variable&) override { callback(); }
  drumline::Callback callback;
  const uint64_t number = ++count;
  static inline std::atomic<uint64_t> count{0};
};

// Whether a copy of the bytes is a copy of the tensor.
bool have_one_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && b.is_cpu() && a.layout() == at::kStrided && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_conj() && !a.is_neg();
}

}  // namespace

extern "C" {

Message drumline_hook_set(at::Tensor* leaf, drumline::Closure closure, uint64_t* number) {
  return guarded([&] {
    auto hook = std::make_unique<Hook>(closure);
    *number = hook->number;
    TORCH_CHECK(leaf->is_leaf() && leaf->requires_grad(), "a hook on gradients needs a leaf that requires them");
    torch::autograd::impl::set_post_acc_grad_hooks(*leaf, std::move(hook));
  });
}

Message drumline_hook_is_set(const at::Tensor* leaf, bool* is_set) {
  return guarded([&] { *is_set = torch::autograd::impl::post_acc_grad_hooks(*leaf) != nullptr; });
}

// A later hook, which has replaced this one, stays.
Message drumline_hook_clear(at::Tensor* leaf, uint64_t number) {
  return guarded([&] {
    auto* hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(*leaf).get());
    if (hook != nullptr && hook->number == number) torch::autograd::impl::set_post_acc_grad_hooks(*leaf, nullptr);
  });
}

// Reports to autograd that the memory was written, so that a backward that needs the old values fails instead of being
// wrong.
Message drumline_tensor_written(at::Tensor* tensor) {
  return guarded([&] {
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  });
}

// A null or undefined `grad` makes the gradient undefined.
Message drumline_grad_set(at::Tensor* leaf, at::Tensor* grad) {
  return guarded([&] { leaf->mutable_grad() = grad == nullptr ? at::Tensor() : *grad; });
}

// Whether each leaf has this gradient: the same tensor, or none where null is given.
Message drumline_grads_are(drumline::List leaves, drumline::List grads, bool* are) {
  return guarded([&] {
    *are = true;
    for (std::size_t i = 0; *are && i < leaves.len; ++i) {
      const at::Tensor& held = leaves.items[i]->grad();
      *are = grads.items[i] == nullptr ? !held.defined() : held.is_same(*grads.items[i]);
    }
  });
}

Message drumline_grad_take(at::Tensor* leaf, at::Tensor** grad) {
  return guarded([&] {
    auto& held = leaf->mutable_grad();
    *grad = held.defined() ? new at::Tensor(std::move(held)) : nullptr;
    held = at::Tensor();
  });
}

// `copy` copies bytes.
Message drumline_grad_into(at::Tensor* leaf, at::Tensor* place, void (*copy)(void*, const void*, size_t), bool* had_one) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto& held = leaf->mutable_grad();
    *had_one = held.defined();
    if (!held.defined() || held.unsafeGetTensorImpl() == place->unsafeGetTensorImpl()) return;
    if (have_one_layout(held, *place)) {
      copy(place->mutable_data_ptr(), held.const_data_ptr(), held.nbytes());
    } else {
      place->copy_(held.is_sparse() ? held.to_dense() : held);
    }
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
