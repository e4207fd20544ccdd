// What activation checkpoints need to know of tensors and operations, and cannot ask tch.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <vector>

#include "list.h"
#include "saved_tensors.h"
#include "status.h"

using drumline::guarded;
using drumline::Message;
using torch::autograd::Node;

namespace {

// What a tensor is for autograd. The layout is that of `Role` in input.rs.
enum class Role : int8_t { constant = 0, parameter = 1, activation = 2 };

// From where a saved tensor comes. The layout is that of `Origin` in origin.rs.
struct Origin {
  // The index of an input, or -1.
  int64_t input;
  // Whether it is in the memory of the input, or else of a copy in another type.
  bool is_cast;
  // A new handle of the parameter that was cast, or null.
  at::Tensor* parameter;
};

// Begins the graph of a second forward, through which no backward runs.
struct SecondInput : Node {
  std::string name() const override { return "SecondInput"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    TORCH_CHECK(false, "the second forward of a checkpoint has no backward of its own");
  }
};

bool shares_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.has_storage() && other.has_storage() && one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         one.scalar_type() == other.scalar_type();
}

// The edge to what a tensor was cast from, if it is a cast or a view of one.
torch::autograd::Edge cast_from(const at::Tensor& tensor) {
  const at::TensorBase& base = tensor.is_view() ? tensor._base() : tensor;
  const auto& node = base.grad_fn();
  if (!node || node->name() != "ToCopyBackward0" || node->num_outputs() != 1) return {};
  return node->next_edge(0);
}

// The operations that run on this thread, innermost last.
thread_local std::vector<const at::RecordFunction*> running;
// The first random operation, while they are looked for.
thread_local std::string random_operation;

std::unique_ptr<at::ObserverContext> begun(const at::RecordFunction& operation) {
  running.push_back(&operation);
  return nullptr;
}

void ended(const at::RecordFunction&, at::ObserverContext*) {
  if (!running.empty()) running.pop_back();
}

// Operations such as attention count as random, but draw nothing with a dropout of 0 or in evaluation.
bool is_switched_off(const c10::FunctionSchema& schema, c10::ArrayRef<const c10::IValue> inputs) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size() && i < inputs.size(); ++i) {
    const auto& name = arguments[i].name();
    const bool is_probability = name == "p" || name == "dropout_p" || name == "dropout";
    if (is_probability && inputs[i].isDouble() && inputs[i].toDouble() == 0.0) return true;
    if (name == "train" && inputs[i].isBool() && !inputs[i].toBool()) return true;
  }
  return false;
}

std::unique_ptr<at::ObserverContext> look_for_random(const at::RecordFunction& operation) {
  if (!random_operation.empty()) return nullptr;
  const auto name = operation.operator_name();
  if (!name) return nullptr;
  const auto handle = c10::Dispatcher::singleton().findOp(*name);
  if (!handle || !handle->hasTag(at::Tag::nondeterministic_seeded)) return nullptr;
  if (!is_switched_off(handle->schema(), operation.inputs())) random_operation = operation.name();
  return nullptr;
}

}  // namespace

extern "C" {

int8_t drumline_role_of(const at::Tensor* tensor) {
  if (!tensor->requires_grad()) return static_cast<int8_t>(Role::constant);
  return static_cast<int8_t>(drumline::is_parameter(*tensor) ? Role::parameter : Role::activation);
}

// A tensor over the same memory that has this role. Nothing flows back from it.
Message drumline_with_role(const at::Tensor* tensor, int8_t role, at::Tensor** out) {
  return guarded([&] {
    auto made = std::make_unique<at::Tensor>(tensor->tensor_data());
    if (role == static_cast<int8_t>(Role::parameter)) made->set_requires_grad(true);
    if (role == static_cast<int8_t>(Role::activation)) {
      torch::autograd::set_history(*made, std::shared_ptr<SecondInput>(new SecondInput(), torch::autograd::deleteNode));
    }
    *out = made.release();
  });
}

// From which of the inputs a saved tensor can be made again without computing, by a view or a cast.
Message drumline_origin_of(const at::Tensor* saved, drumline::List inputs, Origin* origin) {
  return guarded([&] {
    *origin = {-1, false, nullptr};
    for (size_t i = 0; i < inputs.len; ++i) {
      if (shares_memory(*saved, *inputs.items[i])) {
        origin->input = static_cast<int64_t>(i);
        return;
      }
    }
    const auto edge = cast_from(*saved);
    if (!edge.is_valid()) return;
    origin->is_cast = true;
    for (size_t i = 0; i < inputs.len; ++i) {
      if (inputs.items[i]->requires_grad() && torch::autograd::impl::gradient_edge(*inputs.items[i]) == edge) {
        origin->input = static_cast<int64_t>(i);
        return;
      }
    }
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get())) {
      origin->parameter = new at::Tensor(leaf->variable);
    }
  });
}

// From now on `drumline_operation` knows which operation runs on this thread.
Message drumline_operations_watch(uint64_t* handle) {
  return guarded([&] {
    running.clear();
    auto callback = at::RecordFunctionCallback(begun, ended).scopes({at::RecordScope::FUNCTION});
    *handle = at::addThreadLocalCallback(callback);
  });
}

// Watches for random operations of this thread.
Message drumline_random_watch(uint64_t* handle) {
  return guarded([&] {
    random_operation.clear();
    auto callback = at::RecordFunctionCallback(look_for_random).needsInputs(true).scopes({at::RecordScope::FUNCTION});
    *handle = at::addThreadLocalCallback(callback);
  });
}

// Ends a watch on the thread that began it.
void drumline_watch_end(uint64_t handle) { at::removeCallback(handle); }

// The innermost operation that runs, as a message to free; null if none is known.
Message drumline_operation() { return running.empty() ? nullptr : drumline::own(running.back()->name()); }

// The first random operation since the watch began, as a message to free; null if there was none.
Message drumline_random_operation() { return random_operation.empty() ? nullptr : drumline::own(random_operation.c_str()); }

// Forgets it, because its result is kept.
void drumline_random_forget() { random_operation.clear(); }

}  // extern "C"
