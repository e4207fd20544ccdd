// What a collective must know of a tensor before it may touch its memory.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// Laid out as `Facts` in collectives/host.rs.
struct Facts {
  void* data;
  size_t numel;
  int8_t dtype;
  bool plain;        // strided, and its elements exist
  bool direct;       // in host memory, in order, as they are read
  bool overlapping;  // several elements in one place
  bool in_graph;     // a write would be lost on autograd
};

}  // namespace

extern "C" {

Message drumline_tensor_facts(at::Tensor* tensor, Facts* facts) {
  return guarded([&] {
    TORCH_CHECK(tensor->defined(), "the tensor is undefined");
    facts->numel = static_cast<size_t>(tensor->numel());
    facts->dtype = static_cast<int8_t>(tensor->scalar_type());
    facts->plain = tensor->layout() == at::kStrided && !tensor->is_meta();
    facts->direct = facts->plain && tensor->is_cpu() && tensor->is_contiguous() && !tensor->is_conj() && !tensor->is_neg() &&
                    !tensor->_is_zerotensor();
    facts->data = facts->direct ? tensor->mutable_data_ptr() : nullptr;
    facts->overlapping = facts->plain && at::has_internal_overlap(*tensor) == at::MemOverlap::Yes;
    facts->in_graph = tensor->requires_grad() && !tensor->is_leaf() && at::GradMode::is_enabled();
  });
}

// Autograd is told that the memory was written, so that a backward that needs what was there fails instead of being wrong.
Message drumline_tensor_written(at::Tensor* tensor) {
  return guarded([&] {
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  });
}

// A tensor in host memory, of the type of `like`, not yet written.
Message drumline_tensor_room(at::Tensor* like, const int64_t* sizes, size_t dims, at::Tensor** out) {
  return guarded([&] {
    auto options = at::TensorOptions().dtype(like->scalar_type());
    *out = new at::Tensor(at::empty(at::IntArrayRef(sizes, dims), options));
  });
}

}  // extern "C"
