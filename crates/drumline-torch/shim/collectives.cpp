// What a collective needs to know about a tensor before it uses its memory.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// The layout is that of `Facts` in collectives/facts.rs.
struct Facts {
  void* data;
  size_t numel;
  int8_t dtype;
  int16_t gpu;       // its number, or -1 for the host and other devices
  bool plain;        // strided, and its elements exist
  bool on_host;
  bool in_order;     // the elements lie as they are read
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
    facts->gpu = tensor->is_cuda() ? static_cast<int16_t>(tensor->get_device()) : int16_t{-1};
    facts->on_host = tensor->is_cpu();
    facts->in_order =
        facts->plain && tensor->is_contiguous() && !tensor->is_conj() && !tensor->is_neg() && !tensor->_is_zerotensor();
    facts->data = facts->in_order && (facts->on_host || facts->gpu >= 0) ? tensor->mutable_data_ptr() : nullptr;
    facts->overlapping = facts->plain && at::has_internal_overlap(*tensor) == at::MemOverlap::Yes;
    facts->in_graph = tensor->requires_grad() && !tensor->is_leaf() && at::GradMode::is_enabled();
  });
}

// An uninitialised tensor of the type of `like`, in host memory or on the device of `like`.
Message drumline_tensor_room(at::Tensor* like, bool on_host, const int64_t* sizes, size_t dims, at::Tensor** out) {
  return guarded([&] {
    auto options = at::TensorOptions().dtype(like->scalar_type());
    if (!on_host) options = options.device(like->device());
    *out = new at::Tensor(at::empty(at::IntArrayRef(sizes, dims), options));
  });
}

}  // extern "C"
