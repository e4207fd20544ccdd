// One operation on each tensor of a list; on a GPU in few kernels.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_zero.h>

#include "list.h"
#include "status.h"

using drumline::guarded;
using drumline::List;
using drumline::Message;

namespace {

// libtorch returns an error for empty lists, for which there is nothing to do.
template <class Body>
Message on(List list, Body&& body) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    auto tensors = list.tensors();
    if (!tensors.empty()) body(tensors);
  });
}

}  // namespace

extern "C" {

Message drumline_foreach_add_scalar(List list, double scalar) {
  return on(list, [&](auto& tensors) { at::_foreach_add_(tensors, scalar); });
}

Message drumline_foreach_add(List list, List other, double alpha) {
  return on(list, [&](auto& tensors) { at::_foreach_add_(tensors, other.tensors(), alpha); });
}

Message drumline_foreach_mul_scalar(List list, double scalar) {
  return on(list, [&](auto& tensors) { at::_foreach_mul_(tensors, scalar); });
}

Message drumline_foreach_mul_tensor(List list, at::Tensor* number) {
  return on(list, [&](auto& tensors) { at::_foreach_mul_(tensors, *number); });
}

Message drumline_foreach_clamp(List list, double min, double max) {
  return on(list, [&](auto& tensors) {
    at::_foreach_clamp_min_(tensors, min);
    at::_foreach_clamp_max_(tensors, max);
  });
}

Message drumline_foreach_copy(List list, List source) {
  return on(list, [&](auto& tensors) { at::_foreach_copy_(tensors, source.tensors()); });
}

Message drumline_foreach_lerp(List list, List end, double weight) {
  return on(list, [&](auto& tensors) { at::_foreach_lerp_(tensors, end.tensors(), weight); });
}

Message drumline_foreach_zero(List list) {
  return on(list, [&](auto& tensors) { at::_foreach_zero_(tensors); });
}

// `norms` has room for as many handles as the list has tensors.
Message drumline_foreach_norm(List list, double ord, at::Tensor** norms) {
  return on(list, [&](auto& tensors) {
    for (auto& norm : at::_foreach_norm(tensors, ord)) *norms++ = new at::Tensor(norm);
  });
}

}  // extern "C"
