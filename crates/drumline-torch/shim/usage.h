// Tensors whose memory comes and goes.
#pragma once

#include <ATen/core/Tensor.h>

namespace drumline {

// Whether a tensor's memory is that of a watched one.
bool is_watched(const at::Tensor& tensor);

}  // namespace drumline
