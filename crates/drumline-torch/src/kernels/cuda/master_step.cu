// Steps f32 master weights by gradients of type T, and rounds the results to T, in one pass over memory.
//
// A launch processes up to LISTED tensors, each in blocks of PER_BLOCK elements. LISTED, PER_BLOCK and THREADS are
// defined when this is compiled. T has 16 bits, so that a thread processes N = 8 elements at a time.

struct Tensors {
  float* master[LISTED];
  float* first[LISTED];   // momentum, or the mean of gradients; null if there is none
  float* second[LISTED];  // the mean of their squares
  float* step[LISTED];
  const T* grad[LISTED];
  T* rounded[LISTED];
  long long count[LISTED];
  long long begin[LISTED];  // the first block of each
  long long listed;
};

struct alignas(16) Four { float at[4]; };

struct Part {
  int tensor;
  long long from, to;
};

__device__ inline Part part_of(const Tensors& all) {
  int tensor = 0;
  while (tensor + 1 < all.listed && all.begin[tensor + 1] <= blockIdx.x) ++tensor;
  long long from = (blockIdx.x - all.begin[tensor]) * (long long)PER_BLOCK;
  long long to = from + PER_BLOCK;
  return {tensor, from, to < all.count[tensor] ? to : all.count[tensor]};
}

__device__ inline void read(float (&to)[N], const float* from) {
  for (int half = 0; half < 2; ++half) {
    Four four = reinterpret_cast<const Four*>(from)[half];
    for (int i = 0; i < 4; ++i) to[4 * half + i] = four.at[i];
  }
}

__device__ inline void write(float* to, const float (&from)[N]) {
  for (int half = 0; half < 2; ++half) {
    Four four;
    for (int i = 0; i < 4; ++i) four.at[i] = from[4 * half + i];
    reinterpret_cast<Four*>(to)[half] = four;
  }
}

// Calls `change(weight, gradient, first, second)` for each element; slots that are null are skipped.
template <typename Change>
__device__ inline void each(const Tensors& all, const Part& part, Change change) {
  float* master = all.master[part.tensor];
  float* first = all.first[part.tensor];
  float* second = all.second[part.tensor];
  const T* grad = all.grad[part.tensor];
  T* rounded = all.rounded[part.tensor];
  for (long long i = part.from + threadIdx.x * N; i < part.to; i += THREADS * N) {
    if (i + N <= part.to) {
      float w[N], m[N] = {}, v[N] = {};
      Vec g = *reinterpret_cast<const Vec*>(grad + i), r;
      read(w, master + i);
      if (first != nullptr) read(m, first + i);
      if (second != nullptr) read(v, second + i);
      for (int j = 0; j < N; ++j) {
        change(w[j], to_float(g.at[j]), m[j], v[j]);
        from_float(r.at[j], w[j]);
      }
      write(master + i, w);
      if (first != nullptr) write(first + i, m);
      if (second != nullptr) write(second + i, v);
      *reinterpret_cast<Vec*>(rounded + i) = r;
    } else {
      for (long long k = i; k < part.to; ++k) {
        float m = first == nullptr ? 0 : first[k], v = second == nullptr ? 0 : second[k];
        change(master[k], to_float(grad[k]), m, v);
        if (first != nullptr) first[k] = m;
        if (second != nullptr) second[k] = v;
        from_float(rounded[k], master[k]);
      }
    }
  }
}

// `lr_at` and `found_inf` may be null. Buffers begin as zeros.
extern "C" __global__ void __launch_bounds__(THREADS) sgd_step(const Tensors all, const float* lr_at, const float* found_inf, float lr, float momentum,
                                                               float weight_decay, int nesterov, int maximize) {
  if (found_inf != nullptr && *found_inf == 1) return;
  if (lr_at != nullptr) lr = *lr_at;
  each(all, part_of(all), [=](float& w, float g, float& m, float&) {
    if (maximize) g = -g;
    if (weight_decay != 0) g += weight_decay * w;
    if (momentum != 0) {
      m = momentum * m + g;
      g = nesterov ? g + momentum * m : m;
    }
    w -= lr * g;
  });
}

extern "C" __global__ void __launch_bounds__(THREADS) adam_step(const Tensors all, const float* lr_at, const float* found_inf, float lr, float beta1,
                                                                float beta2, float eps, float weight_decay, int decoupled, int maximize) {
  if (found_inf != nullptr && *found_inf == 1) return;
  if (lr_at != nullptr) lr = *lr_at;
  Part part = part_of(all);
  __shared__ float rate, root;
  if (threadIdx.x == 0) {
    double step = (double)*all.step[part.tensor] + 1;
    rate = (float)(lr / (1 - pow((double)beta1, step)));
    root = (float)sqrt(1 - pow((double)beta2, step));
  }
  __syncthreads();
  float by_rate = rate, by_root = root;
  each(all, part, [=](float& w, float g, float& m, float& v) {
    if (maximize) g = -g;
    if (weight_decay != 0) {
      if (decoupled) {
        w -= lr * weight_decay * w;
      } else {
        g += weight_decay * w;
      }
    }
    m += (1 - beta1) * (g - m);
    v = beta2 * v + (1 - beta2) * g * g;
    w -= by_rate * __fdiv_rn(m, __fdiv_rn(__fsqrt_rn(v), by_root) + eps);
  });
}

// Counts a step that was not skipped; one thread for each tensor.
extern "C" __global__ void count_step(const Tensors all, const float* found_inf) {
  if (threadIdx.x < all.listed && !(found_inf != nullptr && *found_inf == 1)) {
    *all.step[threadIdx.x] += 1;
  }
}
