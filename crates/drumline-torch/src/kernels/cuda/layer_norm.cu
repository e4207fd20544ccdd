// Layer normalisation, alone or of a sum: s = x + dropout(branch + bias), y = (s - mean) / deviation * weight + shift. WIDTH
// threads process a row, one vector each, and then the next row. Values of columns stay in their registers. A block has
// GROUPS such groups of threads, up to four. x and s may be f32 while the rest has 16 bits. DROPS says whether there is
// dropout.

__device__ inline float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// Waits for the threads of the same row. A block has few barriers, and their numbers must be compile-time constants.
__device__ inline void wait_for_row(int group) {
#define WAIT(number) asm volatile("bar.sync " #number ", %0;" ::"n"(WIDTH) : "memory")
  if (GROUPS == 1) return __syncthreads();
  if (group == 0) WAIT(1);
  if (GROUPS > 1 && group == 1) WAIT(2);
  if (GROUPS > 2 && group == 2) WAIT(3);
  if (GROUPS > 3 && group == 3) WAIT(4);
}

// Adds up two numbers over a row's threads. `turn` alternates between calls, because late threads still read the places
// of the last call.
__device__ float2 total(float2 own, int& turn) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) own = own + make_float2(__shfl_xor_sync(~0u, own.x, mask), __shfl_xor_sync(~0u, own.y, mask));
  if (WIDTH == 32) return own;
  __shared__ float2 places[GROUPS][2][WIDTH / 32];
  int group = threadIdx.x / WIDTH;
  float2* of_warps = places[group][turn ^= 1];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x % WIDTH / 32] = own;
  wait_for_row(group);
  own = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < WIDTH / 32; ++warp) own = own + of_warps[warp];
  return own;
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

// The same for f32, if that is not `T`.
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

// The factors of a thread's vector in a row: `step` is what the masks of the step depend on.
__device__ inline Floats dropped(const Mask& mask, Seeds step, int row, int size, int vector) {
  int rows = (int)(mask.per_sample / size);
  Floats factors;
  factors_of<N>(mask, of_sample(mask, step, row / rows), (long long)(row % rows) * size + vector * N, factors.at);
  return factors;
}

template <class S>
__device__ void forward(const Mask& mask, const S* __restrict__ x, const T* __restrict__ branch, const float* branch_bias, S* __restrict__ sum, T* __restrict__ y,
                        float2* __restrict__ stats, const float* weight, const float* shift, int rows, int size, float eps) {
  int vector = threadIdx.x % WIDTH, turn = 0;
  bool is_in = vector < size / N;
  Seeds step = {};
  if (DROPS) step = of_step(mask);
  Floats w = {}, b = {}, extra = {};
  if (is_in) w = columns(weight, vector), b = columns(shift, vector);
  if (is_in && branch_bias) extra = columns(branch_bias, vector);
  for (int row = blockIdx.x * GROUPS + threadIdx.x / WIDTH; row < rows; row += gridDim.x * GROUPS) {
    size_t start = (size_t)row * size;
    Floats v = {};
    float2 sums = make_float2(0, 0);
    if (is_in) {
      v = read(x + start, vector);
      if (branch) {
        Floats other = read(branch + start, vector);
        Floats factors = {};
        if (DROPS) factors = dropped(mask, step, row, size, vector);
        for (int i = 0; i < N; ++i) v.at[i] += (other.at[i] + extra.at[i]) * (DROPS ? factors.at[i] : 1.f);
        round_as(sum, v);
        write(sum + start, vector, v);
      }
      for (int i = 0; i < N; ++i) sums.x += v.at[i];
    }
    float mean = total(sums, turn).x / size;
    sums = make_float2(0, 0);
    for (int i = 0; i < N; ++i) sums.x += is_in ? (v.at[i] - mean) * (v.at[i] - mean) : 0.f;
    float inverse = rsqrtf(total(sums, turn).x / size + eps);
    if (vector == 0) stats[row] = make_float2(mean, inverse);
    for (int i = 0; i < N; ++i) v.at[i] = fmaf((v.at[i] - mean) * inverse, w.at[i], b.at[i]);
    if (is_in) write(y + start, vector, v);
  }
}

// Adds up the columns of the groups of a block, for `columns_total`.
__device__ void leave(const Floats& own, int size, float* partial) {
  __shared__ float sums[WIDTH * N];
  int vector = threadIdx.x % WIDTH;
  for (int group = 0; group < GROUPS; ++group) {
    for (int i = 0; i < N && threadIdx.x / WIDTH == group; ++i) {
      // Neighbouring threads use different banks.
      float& place = sums[i * WIDTH + vector];
      place = group == 0 ? own.at[i] : place + own.at[i];
    }
    __syncthreads();
  }
  for (int column = threadIdx.x; column < size; column += WIDTH * GROUPS) partial[column] = sums[column % N * WIDTH + column / N];
  __syncthreads();
}

// `branch_grad` is the gradient of the branch, with dropout or in 16 bits where x is f32; null if it is that of x. `partial` has three rows of columns for
// each block: for weight, shift and the branch's bias.
template <class S>
__device__ void backward(const Mask& mask, const T* __restrict__ dy, const S* __restrict__ dsum, const S* __restrict__ sum, const float2* __restrict__ stats,
                         const float* weight, S* __restrict__ dx, T* __restrict__ branch_grad, float* partial, int rows, int size) {
  int vector = threadIdx.x % WIDTH, turn = 0;
  bool is_in = vector < size / N;
  Seeds step = {};
  if (DROPS) step = of_step(mask);
  Floats w = {}, of_weight = {}, of_shift = {}, of_bias = {};
  if (is_in) w = columns(weight, vector);
  for (int row = blockIdx.x * GROUPS + threadIdx.x / WIDTH; row < rows; row += gridDim.x * GROUPS) {
    size_t start = (size_t)row * size;
    float2 stat = stats[row], sums = make_float2(0, 0);
    Floats g = {}, v = {}, more = {};
    if (is_in) {
      g = read(dy + start, vector);
      v = read(sum + start, vector);
      if (dsum) more = read(dsum + start, vector);
      for (int i = 0; i < N; ++i) {
        v.at[i] = (v.at[i] - stat.x) * stat.y;
        of_weight.at[i] += g.at[i] * v.at[i];
        of_shift.at[i] += g.at[i];
        g.at[i] *= w.at[i];
        sums = sums + make_float2(g.at[i], g.at[i] * v.at[i]);
      }
    }
    sums = total(sums, turn);
    for (int i = 0; i < N; ++i) g.at[i] = stat.y * (g.at[i] - sums.x / size - v.at[i] * (sums.y / size)) + more.at[i];
    if (is_in) write(dx + start, vector, g);
    if (DROPS) {
      Floats factors = dropped(mask, step, row, size, vector);
      for (int i = 0; i < N; ++i) g.at[i] *= factors.at[i];
    }
    for (int i = 0; i < N; ++i) of_bias.at[i] += g.at[i];
    if (is_in && branch_grad) write(branch_grad + start, vector, g);
  }
  float* own = partial + (size_t)blockIdx.x * 3 * size;
  leave(of_weight, size, own);
  leave(of_shift, size, own + size);
  leave(of_bias, size, own + 2 * size);
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
  extern "C" __global__ void __launch_bounds__(WIDTH * GROUPS)                                                                                 \
      norm_##name(const Mask mask, const S* x, const T* branch, const float* branch_bias, S* sum, T* y, float2* stats, const float* weight,                  \
                  const float* shift, int rows, int size, float eps) {                                                                     \
    forward(mask, x, branch, branch_bias, sum, y, stats, weight, shift, rows, size, eps);                                                        \
  }                                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(WIDTH * GROUPS)                                                                                 \
      norm_backward_##name(const Mask mask, const T* dy, const S* dsum, const S* sum, const float2* stats, const float* weight, S* dx, T* branch_grad,       \
                           float* partial, int rows, int size) {                                                                           \
    backward(mask, dy, dsum, sum, stats, weight, dx, branch_grad, partial, rows, size);                                                          \
  }

NORM(same, T)
NORM(float, Long)
