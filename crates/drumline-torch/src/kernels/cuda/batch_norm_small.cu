// Batch normalisation of small tensors, in one kernel forward and one backward. A cluster of blocks has all rows of a
// vector of channels, and each thread keeps its rows, up to eight, in registers. Blocks of a cluster read each other's
// sums.

const int KEPT = 8;

__device__ inline void meet() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same address in another block of the cluster.
__device__ inline float of_block(const float* place, int block) {
  float found = 0;
#if __CUDA_ARCH__ >= 900
  unsigned address = (unsigned)__cvta_generic_to_shared(place);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(address) : "memory");
#endif
  return found;
}

// Adds up 2N values of each thread over a warp. In each round each half of the warp takes half of the remaining values.
// Returns the total of the `index`th value.
__device__ float total_of_warp(float (&v)[2 * N], int& index) {
  int lane = threadIdx.x % 32, mask = 16;
  index = 0;
#pragma unroll
  for (int half = N; half >= 1; half /= 2, mask /= 2) {
    bool is_upper = lane & mask;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      float sent = is_upper ? v[i] : v[i + half], kept = is_upper ? v[i + half] : v[i];
      v[i] = kept + __shfl_xor_sync(~0u, sent, mask);
    }
    if (is_upper) index += half;
  }
#pragma unroll
  for (; mask; mask /= 2) v[0] += __shfl_xor_sync(~0u, v[0], mask);
  return v[0];
}

// The totals of 2N values over all rows, the same in all threads of the cluster.
template <int BLOCKS>
__device__ void total_of_cluster(float (&v)[2 * N]) {
  __shared__ float of_warps[32][2 * N], own[2 * N], all[2 * N];
  int index;
  float total = total_of_warp(v, index);
  of_warps[threadIdx.x / 32][index] = total;
  __syncthreads();
  if (threadIdx.x < 2 * N) {
    float sum = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp][threadIdx.x];
    (BLOCKS > 1 ? own : all)[threadIdx.x] = sum;
  }
  if (BLOCKS > 1) {
    meet();
    if (threadIdx.x < 2 * N) {
      float sum = 0;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) sum += of_block(&own[threadIdx.x], block);
      all[threadIdx.x] = sum;
    }
    // No block ends while others read its memory.
    meet();
  } else {
    __syncthreads();
  }
  for (int i = 0; i < 2 * N; ++i) v[i] = all[i];
}

template <int MODE, int BLOCKS>
__device__ void whole_forward(const Vec* __restrict__ x, const Vec* __restrict__ other, Vec* __restrict__ y, u8* __restrict__ mask,
                              const float* weight, const float* bias, Running running, Channels channels, int rows, float momentum, float eps) {
  int first = blockIdx.y * blockDim.x + threadIdx.x, step = BLOCKS * blockDim.x, column = blockIdx.x;
  Vec v[KEPT], o[KEPT], base = x[column];
#pragma unroll
  for (int u = 0; u < KEPT; ++u) {
    int row = first + u * step;
    v[u] = base;
    if (row < rows) v[u] = x[(size_t)row * gridDim.x + column];
    if (MODE == SUM && row < rows) o[u] = other[(size_t)row * gridDim.x + column];
  }
  float sums[2 * N] = {};
#pragma unroll
  for (int u = 0; u < KEPT; ++u) {
    for (int i = 0; i < N; ++i) {
      float d = to_float(v[u].at[i]) - to_float(base.at[i]);
      sums[i] += d;
      sums[N + i] += d * d;
    }
  }
  total_of_cluster<BLOCKS>(sums);
  float scale[N], shift[N];
  for (int i = 0; i < N; ++i) {
    int channel = column * N + i;
    Norm norm(to_float(base.at[i]), sums[i], sums[N + i], weight[channel], bias[channel], rows, eps);
    scale[i] = norm.scale;
    shift[i] = norm.shift;
    if (blockIdx.y == 0 && threadIdx.x == 0) norm.keep(channels, running, channel, rows, momentum);
  }
#pragma unroll
  for (int u = 0; u < KEPT; ++u) {
    int row = first + u * step;
    if (row >= rows) break;
    unsigned bits = 0;
    for (int i = 0; i < N; ++i) {
      float z = fmaf(to_float(v[u].at[i]), scale[i], shift[i]);
      if (MODE == SUM) z += to_float(o[u].at[i]);
      if (MODE != PLAIN) z = relu(z);
      bits |= is_through(z) << i;
      from_float(v[u].at[i], z);
    }
    y[(size_t)row * gridDim.x + column] = v[u];
    if (MODE == SUM) mask[(size_t)row * gridDim.x + column] = bits;
  }
}

template <int MODE, int BLOCKS>
__device__ void whole_backward(Gradients from, Vec* __restrict__ dx, const float* weight, float* dweight, float* dbias, Channels c, int rows) {
  int first = blockIdx.y * blockDim.x + threadIdx.x, step = BLOCKS * blockDim.x, column = blockIdx.x;
  const Vec *__restrict__ dy = from.dy, *__restrict__ dy2 = from.dy2, *__restrict__ x = from.x;
  Vec d[KEPT], v[KEPT];
#pragma unroll
  for (int u = 0; u < KEPT; ++u) {
    size_t place = (size_t)(first + u * step) * gridDim.x + column;
    if (first + u * step >= rows) break;
    d[u] = dy[place];
    v[u] = x[place];
  }
  Own mean(c.mean, column), scale(c.scale, column), shift(c.shift, column);
  float sums[2 * N] = {};
#pragma unroll
  for (int u = 0; u < KEPT; ++u) {
    size_t place = (size_t)(first + u * step) * gridDim.x + column;
    if (first + u * step >= rows) break;
    unsigned bits = MODE == SUM ? from.mask[place] : 0;
    Vec e;
    if (MODE == SUM && dy2) e = dy2[place];
    for (int i = 0; i < N; ++i) {
      float value = to_float(v[u].at[i]), grad = to_float(d[u].at[i]);
      if (MODE == RELU) grad = is_through(fmaf(value, scale.at[i], shift.at[i])) ? grad : 0.f;
      if (MODE == SUM) {
        if (dy2) grad += to_float(e.at[i]);
        grad = bits >> i & 1 ? grad : 0.f;
      }
      if (MODE != PLAIN) from_float(d[u].at[i], grad);
      sums[i] += grad;
      sums[N + i] += grad * (value - mean.at[i]);
    }
    if (MODE == SUM) from.g[place] = d[u];
  }
  total_of_cluster<BLOCKS>(sums);
  float a[N], b[N], k[N];
  for (int i = 0; i < N; ++i) {
    int channel = column * N + i;
    float of_product = sums[N + i] * c.inverse[channel];
    Slope slope(weight[channel], mean.at[i], c.inverse[channel], sums[i], of_product, rows);
    a[i] = slope.a, b[i] = slope.b, k[i] = slope.c;
    if (blockIdx.y == 0 && threadIdx.x == 0) dbias[channel] = sums[i], dweight[channel] = of_product;
  }
#pragma unroll
  for (int u = 0; u < KEPT; ++u) {
    if (first + u * step >= rows) break;
    for (int i = 0; i < N; ++i) from_float(d[u].at[i], fmaf(to_float(d[u].at[i]), a[i], fmaf(to_float(v[u].at[i]), b[i], k[i])));
    dx[(size_t)(first + u * step) * gridDim.x + column] = d[u];
  }
}

#define WHOLE(mode, MODE, BLOCKS, ATTRIBUTE)                                                                                                \
  extern "C" __global__ void ATTRIBUTE __launch_bounds__(512) whole_forward_##mode##_##BLOCKS(                                              \
      const Vec* x, const Vec* other, Vec* y, u8* mask, const float* weight, const float* bias, float* mean, float* var, long long* batches, \
      float* all, int rows, int channels, float momentum, float eps) {                                                                     \
    whole_forward<MODE, BLOCKS>(x, other, y, mask, weight, bias, Running{mean, var, batches}, Channels(all, channels), rows, momentum, eps); \
  }                                                                                                                                         \
  extern "C" __global__ void ATTRIBUTE __launch_bounds__(512) whole_backward_##mode##_##BLOCKS(                                             \
      const Vec* dy, const Vec* dy2, const Vec* x, const u8* mask, Vec* g, Vec* dx, const float* weight, float* dweight, float* dbias,       \
      float* all, int rows, int channels) {                                                                                                 \
    whole_backward<MODE, BLOCKS>(Gradients{dy, dy2, x, mask, g}, dx, weight, dweight, dbias, Channels(all, channels), rows);                \
  }

WHOLE(plain, PLAIN, 1, )
WHOLE(relu, RELU, 1, )
WHOLE(sum, SUM, 1, )
#if __CUDA_ARCH__ >= 900
WHOLE(plain, PLAIN, 8, __cluster_dims__(1, 8, 1))
WHOLE(relu, RELU, 8, __cluster_dims__(1, 8, 1))
WHOLE(sum, SUM, 8, __cluster_dims__(1, 8, 1))
#endif
