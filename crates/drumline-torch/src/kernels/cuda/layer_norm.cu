// Layer normalisation, alone or of a sum: s = x + branch + bias, y = (s - mean) / deviation * weight + shift. A warp takes rows, one after the other; a
// lane has the same numbers of each, PER_LANE vectors, and what belongs to columns stays in its registers. x and s may be f32 while the rest is short.

const int WARPS = 8;

__device__ inline float total(float x) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

struct Floats { float at[N]; };

__device__ inline Floats read(const T* from, int vector) {
  Vec v = ((const Vec*)from)[vector];
  Floats out;
  for (int i = 0; i < N; ++i) out.at[i] = to_float(v.at[i]);
  return out;
}

__device__ inline void write(T* to, int vector, const Floats& values) {
  Vec v;
  for (int i = 0; i < N; ++i) from_float(v.at[i], values.at[i]);
  ((Vec*)to)[vector] = v;
}

struct alignas(16) Quad { float at[4]; };

// Of f32, where that is not `T`.
struct Long { float value; };

__device__ inline Floats read(const Long* from, int vector) {
  Floats out;
  for (int q = 0; q < N / 4; ++q) {
    Quad quad = ((const Quad*)from)[vector * (N / 4) + q];
    for (int i = 0; i < 4; ++i) out.at[4 * q + i] = quad.at[i];
  }
  return out;
}

__device__ inline void write(Long* to, int vector, const Floats& values) {
  for (int q = 0; q < N / 4; ++q) {
    Quad quad;
    for (int i = 0; i < 4; ++i) quad.at[i] = values.at[4 * q + i];
    ((Quad*)to)[vector * (N / 4) + q] = quad;
  }
}

__device__ inline void round_as(const T*, Floats& values) {
  for (int i = 0; i < N; ++i) {
    T short_one;
    from_float(short_one, values.at[i]);
    values.at[i] = to_float(short_one);
  }
}
__device__ inline void round_as(const Long*, Floats&) {}

__device__ inline Floats columns(const float* of, int vector) { return read((const Long*)of, vector); }

template <class S>
__device__ void forward(const S* __restrict__ x, const T* __restrict__ branch, const float* branch_bias, S* __restrict__ sum, T* __restrict__ y,
                        float2* __restrict__ stats, const float* weight, const float* shift, int rows, int size, float eps) {
  int lane = threadIdx.x % 32, vectors = size / N;
  Floats w[PER_LANE], b[PER_LANE], extra[PER_LANE];
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    int vector = lane + 32 * k;
    if (vector >= vectors) break;
    w[k] = columns(weight, vector), b[k] = columns(shift, vector);
    if (branch_bias) extra[k] = columns(branch_bias, vector);
  }
  for (int row = blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += gridDim.x * WARPS) {
    size_t start = (size_t)row * size;
    Floats v[PER_LANE];
    float of_row = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      int vector = lane + 32 * k;
      if (vector >= vectors) break;
      v[k] = read(x + start, vector);
      if (branch) {
        Floats other = read(branch + start, vector);
        for (int i = 0; i < N; ++i) v[k].at[i] += other.at[i] + (branch_bias ? extra[k].at[i] : 0.f);
        round_as(sum, v[k]);
        write(sum + start, vector, v[k]);
      }
      for (int i = 0; i < N; ++i) of_row += v[k].at[i];
    }
    float mean = total(of_row) / size, squares = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      if (lane + 32 * k >= vectors) break;
      for (int i = 0; i < N; ++i) squares += (v[k].at[i] - mean) * (v[k].at[i] - mean);
    }
    float inverse = rsqrtf(total(squares) / size + eps);
    if (lane == 0) stats[row] = make_float2(mean, inverse);
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      int vector = lane + 32 * k;
      if (vector >= vectors) break;
      for (int i = 0; i < N; ++i) v[k].at[i] = fmaf((v[k].at[i] - mean) * inverse, w[k].at[i], b[k].at[i]);
      write(y + start, vector, v[k]);
    }
  }
}

// Adds up what the warps of a block have for each column, and leaves it for `columns_total`.
__device__ void leave(const Floats (&own)[PER_LANE], int vectors, float* partial) {
  __shared__ float sums[PER_LANE * 32 * N];
  int lane = threadIdx.x % 32;
  for (int warp = 0; warp < WARPS; ++warp) {
    if (threadIdx.x / 32 == warp) {
#pragma unroll
      for (int k = 0; k < PER_LANE; ++k) {
        for (int i = 0; i < N; ++i) {
          // Lanes side by side, so that banks are not shared.
          float& place = sums[(k * N + i) * 32 + lane];
          place = warp == 0 ? own[k].at[i] : place + own[k].at[i];
        }
      }
    }
    __syncthreads();
  }
  for (int column = threadIdx.x; column < vectors * N; column += WARPS * 32) {
    int vector = column / N;
    partial[column] = sums[(vector / 32 * N + column % N) * 32 + vector % 32];
  }
  __syncthreads();
}

// `branch_grad` is that of x in short, where x is long; null otherwise. `partial` has three rows of columns for each block: of weight, shift and branch's bias.
template <class S>
__device__ void backward(const T* __restrict__ dy, const S* __restrict__ dsum, const S* __restrict__ sum, const float2* __restrict__ stats,
                         const float* weight, S* __restrict__ dx, T* __restrict__ branch_grad, float* partial, int rows, int size) {
  int lane = threadIdx.x % 32, vectors = size / N;
  Floats w[PER_LANE], of_weight[PER_LANE] = {}, of_shift[PER_LANE] = {}, of_bias[PER_LANE] = {};
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    if (lane + 32 * k < vectors) w[k] = columns(weight, lane + 32 * k);
  }
  for (int row = blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += gridDim.x * WARPS) {
    size_t start = (size_t)row * size;
    float2 stat = stats[row];
    Floats g[PER_LANE], v[PER_LANE];
    float of_g = 0, of_product = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      int vector = lane + 32 * k;
      if (vector >= vectors) break;
      g[k] = read(dy + start, vector);
      v[k] = read(sum + start, vector);
      for (int i = 0; i < N; ++i) {
        float normed = (v[k].at[i] - stat.x) * stat.y;
        of_weight[k].at[i] += g[k].at[i] * normed;
        of_shift[k].at[i] += g[k].at[i];
        g[k].at[i] *= w[k].at[i];
        v[k].at[i] = normed;
        of_g += g[k].at[i];
        of_product += g[k].at[i] * normed;
      }
    }
    of_g = total(of_g) / size;
    of_product = total(of_product) / size;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      int vector = lane + 32 * k;
      if (vector >= vectors) break;
      for (int i = 0; i < N; ++i) g[k].at[i] = stat.y * (g[k].at[i] - of_g - v[k].at[i] * of_product);
      if (dsum) {
        Floats more = read(dsum + start, vector);
        for (int i = 0; i < N; ++i) g[k].at[i] += more.at[i];
      }
      write(dx + start, vector, g[k]);
      if (branch_grad) write(branch_grad + start, vector, g[k]);
      for (int i = 0; i < N; ++i) of_bias[k].at[i] += g[k].at[i];
    }
  }
  float* own = partial + (size_t)blockIdx.x * 3 * size;
  leave(of_weight, vectors, own);
  leave(of_shift, vectors, own + size);
  leave(of_bias, vectors, own + 2 * size);
}

// Adds up `count` rows of columns: a block has 32 columns, and its warps share the rows.
extern "C" __global__ void __launch_bounds__(1024) columns_total(const float* partial, float* to, int count, int size) {
  __shared__ float sums[32][33];
  int column = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0;
  if (column < size) {
#pragma unroll 4
    for (int row = warp; row < count; row += 32) sum += partial[(size_t)row * size + column];
  }
  sums[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp == 0 && column < size) {
    float all = 0;
    for (int row = 0; row < 32; ++row) all += sums[row][threadIdx.x];
    to[column] = all;
  }
}

#define NORM(name, S)                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                                                 \
      norm_##name(const S* x, const T* branch, const float* branch_bias, S* sum, T* y, float2* stats, const float* weight,                  \
                  const float* shift, int rows, int size, float eps) {                                                                     \
    forward(x, branch, branch_bias, sum, y, stats, weight, shift, rows, size, eps);                                                        \
  }                                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                                                 \
      norm_backward_##name(const T* dy, const S* dsum, const S* sum, const float2* stats, const float* weight, S* dx, T* branch_grad,       \
                           float* partial, int rows, int size) {                                                                           \
    backward(dy, dsum, sum, stats, weight, dx, branch_grad, partial, rows, size);                                                          \
  }

NORM(same, T)
NORM(float, Long)
