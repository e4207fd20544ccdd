// Hooks on the tensors that autograd saves for backward, whose two halves are Rust closures.
//
//   an operation saves x ─▶ get_default_saved_variable_hooks ─▶ pack(x) in Rust ─▶ what Rust keeps instead of x
//   backward needs x     ◀───────────────────────────────────── unpack() in Rust ◀──┘
//
// libtorch asks the default engine for these hooks. Its own engine has none, and PyTorch's takes only Python objects.
// So this file has an engine that differs in this method alone. It is registered before main, and never destroyed: an
// engine owns threads, and two engines would each have their own.
#include "saved_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <vector>

#include "status.h"
#include "usage.h"

using drumline::guarded;
using drumline::Message;
using torch::autograd::SavedVariable;

namespace {

// What Rust keeps of a saved tensor.
struct Packed {
  void* context;
  Message (*unpack)(void* context, at::Tensor** out);
  void (*drop)(void* context);
};

// Hooks of the current thread. Rust takes ownership of `data`, which shares memory and version with the saved tensor but
// has no history. `saved` is the tensor itself, borrowed for the call.
struct Scope {
  void* context;
  Message (*pack)(void* context, at::Tensor* data, const at::Tensor* saved, Packed* out);
};

thread_local std::vector<Scope> scopes;

class RustHooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit RustHooks(Scope scope) : scope_(scope) {}
  RustHooks(const RustHooks&) = delete;
  RustHooks& operator=(const RustHooks&) = delete;
  ~RustHooks() override {
    if (packed_.drop != nullptr) packed_.drop(packed_.context);
  }

  // Parameters live as long as the model. Nothing is gained by packing them, and with ZeRO they must stay what they are:
  // views of memory that comes and goes.
  void call_pack_hook(const at::Tensor& saved) override {
    if (drumline::is_parameter(saved)) {
      parameter_ = saved.tensor_data();
      version_ = saved._version();
      return;
    }
    drumline::raise(scope_.pack(scope_.context, new at::Tensor(saved.tensor_data()), &saved, &packed_));
  }

  at::Tensor call_unpack_hook() override {
    if (parameter_.defined()) {
      TORCH_CHECK(parameter_._version() == version_, "a parameter that backward needs was modified in place after the forward (version ",
                  parameter_._version(), ", expected ", version_, "); try to change parameters after backward");
      return parameter_;
    }
    at::Tensor* out = nullptr;
    drumline::raise(packed_.unpack(packed_.context, &out));
    std::unique_ptr<at::Tensor> owned(out);
    return std::move(*owned);
  }

 private:
  Scope scope_;
  Packed packed_{};
  at::Tensor parameter_;
  int64_t version_ = 0;
};

struct HookedEngine : torch::autograd::Engine {
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (scopes.empty()) return nullptr;
    return std::make_unique<RustHooks>(scopes.back());
  }

  static torch::autograd::Engine& get() {
    static auto* engine = new HookedEngine();
    return *engine;
  }
};

// Whether a view leads to a leaf that is a view itself, of memory without gradients.
bool is_view_of_leaf(const at::Tensor& view) {
  std::shared_ptr<torch::autograd::Node> node = view.grad_fn();
  while (node) {
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) return leaf->variable.is_alias_of(view);
    if (node->num_outputs() != 1) return false;
    node = node->next_edge(0).function;
  }
  return false;
}

const bool is_registered = [] {
  torch::autograd::set_default_engine_stub(&HookedEngine::get);
  return true;
}();

}  // namespace

namespace drumline {

bool is_parameter(const at::Tensor& tensor) {
  if (is_watched(tensor)) return true;
  if (!tensor.requires_grad()) return false;
  if (tensor.is_leaf()) return true;
  if (!tensor.is_view()) return false;
  const auto& base = tensor._base();
  return base.requires_grad() ? base.is_leaf() : is_view_of_leaf(tensor);
}

}  // namespace drumline

extern "C" {

// Tensors that operations of this thread save go to `scope`, until it is left.
Message drumline_saved_enter(Scope scope) {
  return guarded([&] {
    TORCH_CHECK(is_registered, "the autograd engine is not registered");
    scopes.push_back(scope);
  });
}

void drumline_saved_leave() { scopes.pop_back(); }

// Saves a tensor without its history, as an operation does: hooks apply, and a later change of the tensor is an error of
// `drumline_saved_get`.
Message drumline_saved_new(const at::Tensor* tensor, SavedVariable** out) {
  return guarded([&] { *out = new SavedVariable(at::Tensor(tensor->tensor_data()), false); });
}

Message drumline_saved_get(const SavedVariable* saved, at::Tensor** out) {
  return guarded([&] { *out = new at::Tensor(saved->unpack()); });
}

void drumline_saved_free(SavedVariable* saved) { delete saved; }

int64_t drumline_version_of(const at::Tensor* tensor) { return tensor->_version(); }

// Turns gradients on or off for this thread; returns what was before.
bool drumline_grad_enable(bool enabled) {
  const bool before = at::GradMode::is_enabled();
  at::GradMode::set_enabled(enabled);
  return before;
}

bool drumline_grad_is_enabled() { return at::GradMode::is_enabled(); }

// The memory of which a tensor is a part; zero if it has none.
void drumline_storage_of(const at::Tensor* tensor, size_t* address, size_t* bytes) {
  *address = *bytes = 0;
  if (!tensor->has_storage()) return;
  const auto& storage = tensor->storage();
  *address = reinterpret_cast<size_t>(storage.data());
  *bytes = storage.nbytes();
}

}  // extern "C"
