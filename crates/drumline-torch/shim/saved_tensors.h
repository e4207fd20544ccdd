// What hooks on saved tensors know of a tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace drumline {

// Whether it is a parameter (a leaf that requires gradients, or memory that comes and goes), or a view of one.
bool is_parameter(const at::Tensor& tensor);

}  // namespace drumline
