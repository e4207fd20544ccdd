// The fused optimizers: one pass over a parameter, its gradient and its state.
//
// The kernels treat every tensor as a plain array and ignore strides: a gradient with another memory layout than its
// parameter would silently be applied to the wrong elements. So all lists are compared with the parameters first.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>

#include "list.h"
#include "status.h"

using drumline::guarded;
using drumline::List;
using drumline::Message;

namespace {

using Tensors = std::vector<at::Tensor>;

// Whether both tensors have the same memory layout. The stride of a dim of size 1 does not matter.
bool lies_as(const at::Tensor& tensor, const at::Tensor& param) {
  if (!tensor.is_non_overlapping_and_dense()) return false;
  for (int64_t dim = 0; dim < param.dim(); ++dim) {
    if (param.size(dim) != 1 && tensor.stride(dim) != param.stride(dim)) return false;
  }
  return true;
}

void check_like(const at::Tensor& tensor, const at::Tensor& param, const char* what) {
  TORCH_CHECK(tensor.defined(), what, " is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, what, " is not dense");
  TORCH_CHECK(tensor.sizes() == param.sizes(), what, " has shape ", tensor.sizes(), ", its parameter ", param.sizes());
  TORCH_CHECK(tensor.scalar_type() == param.scalar_type(), what, " is of type ", tensor.scalar_type(), ", its parameter of ",
              param.scalar_type());
  TORCH_CHECK(tensor.device() == param.device(), what, " is on ", tensor.device(), ", its parameter on ", param.device());
}

void check_list(const Tensors& list, const Tensors& params, const char* what) {
  TORCH_CHECK(list.size() == params.size(), "there are ", params.size(), " parameters, but of ", what, " ", list.size());
  for (size_t i = 0; i < params.size(); ++i) {
    check_like(list[i], params[i], what);
    TORCH_CHECK(lies_as(list[i], params[i]), what, " has strides ", list[i].strides(), ", its parameter ", params[i].strides());
  }
}

void check_steps(const Tensors& steps, const Tensors& params) {
  TORCH_CHECK(steps.size() == params.size(), "there are ", params.size(), " parameters, but ", steps.size(), " steps");
  for (const auto& step : steps) {
    TORCH_CHECK(step.defined() && step.numel() == 1 && step.scalar_type() == at::kFloat, "a step is one number of type Float");
  }
}

// The kernels read `steps` but do not advance them. On a CPU one operation for each would take longer than the kernel
// takes for small parameters.
void count_step(const Tensors& steps) {
  if (!steps.front().is_cpu()) return at::_foreach_add_(steps, 1);
  for (const auto& step : steps) *step.mutable_data_ptr<float>() += 1;
}

using Optional = std::optional<at::Tensor>;

// A step that was skipped is not counted: `found_inf` is 1 then, and 0 otherwise.
void take_back(const Tensors& steps, const Optional& found_inf) {
  if (!found_inf) return;
  if (!steps.front().is_cpu()) return at::_foreach_sub_(steps, Tensors(steps.size(), *found_inf));
  const float left_out = *found_inf->const_data_ptr<float>();
  for (const auto& step : steps) *step.mutable_data_ptr<float>() -= left_out;
}

// A number that the kernel reads on the parameters' device, if there is one.
Optional number(const at::Tensor* tensor, const Tensors& params, const char* what) {
  if (tensor == nullptr) return std::nullopt;
  TORCH_CHECK(tensor->defined() && tensor->numel() == 1 && tensor->scalar_type() == at::kFloat, what, " is one number of type Float");
  return tensor->to(params.front().device());
}

}  // namespace

extern "C" {

// Each may be null. `lr` replaces the number; gradients are divided by `grad_scale` in place; if `found_inf` is 1,
// nothing changes.
struct StepTensors {
  const at::Tensor *lr, *grad_scale, *found_inf;
};

struct SgdArguments {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize, is_first_step;
};

// Without momentum the list of buffers is empty.
Message drumline_fused_sgd(List params, List grads, List momentum_buffers, StepTensors tensors, const SgdArguments* with) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto p = params.tensors(), g = grads.tensors(), m = momentum_buffers.tensors();
    check_list(p, p, "a parameter");
    check_list(g, p, "a gradient");
    if (with->momentum != 0) check_list(m, p, "a momentum buffer");
    TORCH_CHECK(with->momentum != 0 || m.empty(), "there are momentum buffers, but no momentum");
    if (p.empty()) return;
    const auto lr_tensor = number(tensors.lr, p, "a learning rate");
    const auto grad_scale = number(tensors.grad_scale, p, "a grad_scale");
    const auto found_inf = number(tensors.found_inf, p, "a found_inf");
    auto run = [&](const auto& lr) {
      at::_fused_sgd_(p, g, m, with->weight_decay, with->momentum, lr, with->dampening, with->nesterov, with->maximize,
                      with->is_first_step, grad_scale, found_inf);
    };
    lr_tensor ? run(*lr_tensor) : run(with->lr);
  });
}

struct AdagradArguments {
  double lr, lr_decay, weight_decay, eps;
  bool maximize;
};

// As above. This step is counted in `steps`, unless it is skipped.
Message drumline_fused_adagrad(List params, List grads, List sums, List steps, StepTensors tensors, const AdagradArguments* with) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto p = params.tensors(), g = grads.tensors(), sum = sums.tensors(), counts = steps.tensors();
    check_list(p, p, "a parameter");
    check_list(g, p, "a gradient");
    check_list(sum, p, "a sum");
    check_steps(counts, p);
    if (p.empty()) return;
    const auto lr_tensor = number(tensors.lr, p, "a learning rate");
    const auto grad_scale = number(tensors.grad_scale, p, "a grad_scale");
    const auto found_inf = number(tensors.found_inf, p, "a found_inf");
    count_step(counts);
    auto run = [&](const auto& lr) {
      at::_fused_adagrad_(p, g, sum, counts, lr, with->lr_decay, with->weight_decay, with->eps, with->maximize, grad_scale, found_inf);
    };
    lr_tensor ? run(*lr_tensor) : run(with->lr);
    take_back(counts, found_inf);
  });
}

struct AdamArguments {
  double lr, beta1, beta2, weight_decay, eps;
  bool amsgrad, maximize, decoupled;
};

struct AdamLists {
  List params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

// As above. This step is counted in `steps`, unless it is skipped.
Message drumline_fused_adam(const AdamLists* lists, StepTensors tensors, const AdamArguments* with) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto p = lists->params.tensors(), g = lists->grads.tensors(), steps = lists->steps.tensors();
    auto avg = lists->exp_avgs.tensors(), sq = lists->exp_avg_sqs.tensors(), max = lists->max_exp_avg_sqs.tensors();
    check_list(p, p, "a parameter");
    check_list(g, p, "a gradient");
    check_list(avg, p, "an exp_avg");
    check_list(sq, p, "an exp_avg_sq");
    if (with->amsgrad) check_list(max, p, "a max_exp_avg_sq");
    check_steps(steps, p);
    if (p.empty()) return;
    const auto lr_tensor = number(tensors.lr, p, "a learning rate");
    const auto grad_scale = number(tensors.grad_scale, p, "a grad_scale");
    const auto found_inf = number(tensors.found_inf, p, "a found_inf");
    count_step(steps);
    auto run = [&](const auto& lr) {
      if (with->decoupled) {
        at::_fused_adamw_(p, g, avg, sq, max, steps, lr, with->beta1, with->beta2, with->weight_decay, with->eps, with->amsgrad,
                          with->maximize, grad_scale, found_inf);
      } else {
        at::_fused_adam_(p, g, avg, sq, max, steps, lr, with->beta1, with->beta2, with->weight_decay, with->eps, with->amsgrad,
                         with->maximize, grad_scale, found_inf);
      }
    };
    lr_tensor ? run(*lr_tensor) : run(with->lr);
    take_back(steps, found_inf);
  });
}

// The gradient of `leaf` with the leaf's memory layout: the gradient itself, or a copy; null if there is none.
Message drumline_grad_fitting(at::Tensor* leaf, at::Tensor** fitting) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    const auto& grad = leaf->mutable_grad();
    *fitting = nullptr;
    if (!grad.defined()) return;
    check_like(grad, *leaf, "a gradient");
    *fitting = new at::Tensor(lies_as(grad, *leaf) ? grad : at::empty_like(*leaf).copy_(grad));
  });
}

Message drumline_is_dense(at::Tensor* tensor, bool* dense) {
  return guarded([&] { *dense = tensor->layout() == at::kStrided && tensor->is_non_overlapping_and_dense(); });
}

}  // extern "C"
