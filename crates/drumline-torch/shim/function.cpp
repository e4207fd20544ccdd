// Autograd functions whose forward and backward are Rust closures: a node of the graph that calls into Rust.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "status.h"

using drumline::guarded;
using drumline::Message;
using torch::autograd::variable_list;

namespace {

// Tensors that Rust owns.
struct Handles {
  at::Tensor* const* data;
  size_t count;
};

// The arguments of backward. Rust takes ownership of the handles, and writes those of its results to `results`; null
// means undefined.
struct BackwardCall {
  Handles grads;
  Handles saved;
  const bool* needed;
  at::Tensor** results;
  size_t num_results;
};

// `call` returns null or a message to free, and never unwinds.
struct BackwardClosure {
  void* context;
  Message (*call)(void* context, const BackwardCall* call);
  void (*drop)(void* context);
};

// Owns the closure.
class Backward {
 public:
  explicit Backward(BackwardClosure closure) : closure_(closure) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() { closure_.drop(closure_.context); }

  void operator()(const BackwardCall& call) const { drumline::raise(closure_.call(closure_.context, &call)); }

 private:
  BackwardClosure closure_;
};

std::vector<at::Tensor*> handed_over(const variable_list& tensors) {
  std::vector<at::Tensor*> handles;
  handles.reserve(tensors.size());
  for (const auto& tensor : tensors) handles.push_back(tensor.defined() ? new at::Tensor(tensor) : nullptr);
  return handles;
}

struct RustFunction : torch::autograd::Node {
  explicit RustFunction(std::unique_ptr<Backward> backward) : backward_(std::move(backward)) {}

  std::string name() const override { return "RustFunction"; }

  void save(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.defined(), "a tensor that forward saved is undefined");
    saved_.emplace_back(tensor, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    auto saved = unpacked();
    auto needed = std::make_unique<bool[]>(num_outputs());
    for (size_t i = 0; i < num_outputs(); ++i) needed[i] = task_should_compute_output(i);
    std::vector<at::Tensor*> results(num_outputs(), nullptr);
    {
      at::NoGradGuard no_grad;
      auto grad_handles = handed_over(grads);
      auto saved_handles = handed_over(saved);
      (*backward_)({{grad_handles.data(), grad_handles.size()},
                    {saved_handles.data(), saved_handles.size()},
                    needed.get(),
                    results.data(),
                    results.size()});
    }
    variable_list out;
    for (auto* result : results) {
      std::unique_ptr<at::Tensor> owned(result);
      out.push_back(owned ? std::move(*owned) : at::Tensor());
    }
    // Grad mode is on here if backward was called with create_graph.
    if (at::GradMode::is_enabled()) refuse_a_second(grads, out);
    return out;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& saved : saved_) saved.reset_data();
  }

 private:
  variable_list unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list tensors;
    auto self = shared_from_this();
    for (auto& saved : saved_) tensors.push_back(saved.unpack(self));
    return tensors;
  }

  // Differentiating the results is an error, because their gradients would lack a part.
  void refuse_a_second(const variable_list& grads, variable_list& results) {
    auto edges = next_edges();
    for (const auto& grad : grads) {
      if (grad.defined() && grad.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(grad));
    }
    auto error = std::make_shared<torch::autograd::Error>(
        "a function made of Rust closures cannot be differentiated twice; try the operations of libtorch", std::move(edges));
    for (auto& result : results) {
      if (result.defined()) result = result.detach();
      torch::autograd::set_history(result, error);
    }
  }

  std::unique_ptr<Backward> backward_;
  std::vector<torch::autograd::SavedVariable> saved_;
};

bool contains(Handles handles, const at::Tensor& tensor) {
  for (size_t i = 0; i < handles.count; ++i) {
    if (handles.data[i]->is_same(tensor)) return true;
  }
  return false;
}

}  // namespace

extern "C" {

Message drumline_requires_grad(at::Tensor* tensor, bool* needed) {
  return guarded([&] { *needed = tensor->defined() && tensor->requires_grad() && at::GradMode::is_enabled(); });
}

// Adds a node with this backward between inputs and outputs. The outputs are replaced by handles with a history.
Message drumline_function_record(Handles inputs, Handles outputs, Handles saved, Handles constant, BackwardClosure closure) {
  return guarded([&] {
    auto node = std::shared_ptr<RustFunction>(new RustFunction(std::make_unique<Backward>(closure)), torch::autograd::deleteNode);
    bool needed = false;
    torch::autograd::edge_list edges;
    for (size_t i = 0; i < inputs.count; ++i) {
      const auto& input = *inputs.data[i];
      bool wanted = at::GradMode::is_enabled() && input.defined() && input.requires_grad();
      edges.push_back(wanted ? torch::autograd::impl::gradient_edge(input) : torch::autograd::Edge());
      needed |= wanted;
    }
    if (needed) {
      node->set_next_edges(std::move(edges));
      for (size_t i = 0; i < saved.count; ++i) node->save(*saved.data[i]);
    }
    for (size_t i = 0; i < outputs.count; ++i) {
      auto& output = *outputs.data[i];
      TORCH_CHECK(output.defined(), "output ", i, " is undefined");
      bool differentiable = torch::autograd::isDifferentiableType(output.scalar_type()) && !contains(constant, output);
      // A new handle: an output may be an input, a view of one, or another output.
      output = output.detach();
      if (needed && differentiable) {
        torch::autograd::set_history(output, node);
      } else {
        node->add_input_metadata(torch::autograd::Node::undefined_input());
      }
    }
  });
}

}  // extern "C"
