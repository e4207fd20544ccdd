// Backward from several tensors with given gradients, and from tensors whose values are freed already.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "list.h"
#include "status.h"

using drumline::guarded;
using drumline::Message;
using torch::autograd::Edge;

extern "C" {

// Where a tensor is in the graph; null for one that needs no gradient. The caller owns it.
Message drumline_edge_of(const at::Tensor* tensor, Edge** edge) {
  return guarded([&] { *edge = tensor->requires_grad() ? new Edge(torch::autograd::impl::gradient_edge(*tensor)) : nullptr; });
}

// Frees an edge, and the graph behind it unless others hold it.
Message drumline_edge_free(Edge* edge) {
  return guarded([&] { delete edge; });
}

// There are as many edges as gradients. Gradients are accumulated into leaves, and their hooks run.
Message drumline_backward_from(Edge* const* edges, drumline::List grads, bool keep_graph) {
  return guarded([&] {
    torch::autograd::edge_list roots;
    roots.reserve(grads.len);
    for (std::size_t i = 0; i < grads.len; ++i) roots.push_back(*edges[i]);
    torch::autograd::Engine::get_default_engine().execute(roots, grads.tensors(), keep_graph, /*create_graph=*/false, /*accumulate_grad=*/true);
  });
}

}  // extern "C"
