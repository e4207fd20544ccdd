// A list of tensors in the C interface: an array of handles that the caller owns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace drumline {

struct List {
  at::Tensor* const* items;
  std::size_t len;

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> copies;
    copies.reserve(len);
    for (std::size_t i = 0; i < len; ++i) copies.push_back(*items[i]);
    return copies;
  }
};

}  // namespace drumline
