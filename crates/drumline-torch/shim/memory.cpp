// Tensors over memory with another owner, which is dropped with the last of them.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <memory>

#include "callback.h"

using drumline::guarded;
using drumline::Message;

extern "C" {

// `owner.call` is never called; `owner.drop` is, with the last tensor over the memory.
Message drumline_tensor_over(void* data, const int64_t* sizes, size_t dims, int8_t kind, drumline::Closure owner, at::Tensor** out) {
  return guarded([&] {
    auto held = std::make_shared<drumline::Callback>(owner);
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(kind));
    *out = new at::Tensor(at::from_blob(data, at::IntArrayRef(sizes, dims), [held](void*) {}, options));
  });
}

// A tensor with the strides of `like` on the memory of `flat`, starting at `offset` elements. It is a leaf, unlike a
// view.
Message drumline_tensor_within(at::Tensor* flat, int64_t offset, at::Tensor* like, at::Tensor** out) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    *out = new at::Tensor(flat->as_strided(like->sizes(), like->strides(), flat->storage_offset() + offset).detach());
  });
}

// All tensors over the storage of `tensor` have their elements at `address` from now on. `owner` is dropped when they are
// elsewhere. Nothing is copied.
Message drumline_storage_move(const at::Tensor* tensor, void* address, drumline::Closure owner) {
  return guarded([&] {
    auto held = std::make_unique<drumline::Callback>(owner);
    const auto drop = [](void* held) { delete static_cast<drumline::Callback*>(held); };
    auto* storage = tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(at::DataPtr(address, held.release(), drop, tensor->device()));
  });
}

// Does not wait if one side is on a GPU and the other in pinned memory.
Message drumline_copy_async(at::Tensor* to, const at::Tensor* from) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    to->copy_(*from, true);
  });
}

}  // extern "C"
