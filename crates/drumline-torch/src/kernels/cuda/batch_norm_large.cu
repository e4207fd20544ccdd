// Batch normalisation of large tensors, in two passes forward and two backward. In each pass the whole GPU reads all
// rows.
//
//   forward    stats: sums; the last block makes of them what apply needs      apply: y
//   backward   sums: the same of the gradients                                 input: dx
//
// A thread loads several rows before it uses the first. A block is `lanes` vectors wide and 256 / lanes rows high.

const int THREADS = 256;
const int AT_ONCE = 4;
// Blocks that add up their sums in the first round.
const int GROUP = 16;

// Adds up two sums of each channel over the block's rows: `totals` has the first sums of all channels, then the second.
__device__ void total_of_block(const float (&first)[N], const float (&second)[N], int lanes, float* totals) {
  __shared__ float kept[2][THREADS * N];
  int lane = threadIdx.x % lanes, row = threadIdx.x / lanes, rows = THREADS / lanes, width = lanes * N;
  for (int i = 0; i < N; ++i) {
    kept[0][row * width + lane * N + i] = first[i];
    kept[1][row * width + lane * N + i] = second[i];
  }
  __syncthreads();
  // A tree reduction until few rows are left.
  int left = rows;
  for (; left * width > THREADS && left > 1; left /= 2) {
    for (int place = threadIdx.x; place < left / 2 * width; place += THREADS) {
      kept[0][place] += kept[0][place + left / 2 * width];
      kept[1][place] += kept[1][place + left / 2 * width];
    }
    __syncthreads();
  }
  for (int column = threadIdx.x; column < 2 * width; column += THREADS) {
    float sum = 0;
    for (int r = 0; r < left; ++r) sum += kept[column / width][r * width + column % width];
    totals[column] = sum;
  }
  __syncthreads();
}

// Whether this block is the last of `count` blocks to arrive. What the others have written is then visible.
__device__ bool is_last(unsigned* counter, unsigned count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == count - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

// Adds up `count` consecutive lists of sums, as many at a time as there are threads.
__device__ void add_lists(const float4* lists, int count, int quads, float* totals) {
  __shared__ float4 shares[THREADS];
  int quad = threadIdx.x % quads, side = THREADS / quads;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int list = threadIdx.x / quads; list < count; list += side) {
    float4 next = __ldcg(&lists[(size_t)list * quads + quad]);
    sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
  }
  shares[threadIdx.x] = sum;
  __syncthreads();
  for (int quad = threadIdx.x; quad < quads; quad += THREADS) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int share = 0; share < side; ++share) {
      float4 next = shares[share * quads + quad];
      sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
    }
    ((float4*)totals)[quad] = sum;
  }
  __syncthreads();
}

__device__ void write_list(const float* totals, float4* list, int quads) {
  for (int quad = threadIdx.x; quad < quads; quad += THREADS) list[quad] = ((const float4*)totals)[quad];
}

// The same over all blocks of these channels, in two rounds, so that no block reads many sums. Returns true in the last
// block, whose `totals` are then those of all blocks.
__device__ bool total(const float (&first)[N], const float (&second)[N], int lanes, float* partial, unsigned* counter, float* totals) {
  total_of_block(first, second, lanes, totals);
  int quads = 2 * lanes * N / 4, groups = (gridDim.y + GROUP - 1) / GROUP, group = blockIdx.y / GROUP;
  int members = min(GROUP, gridDim.y - group * GROUP);
  float4* lists = (float4*)partial + (size_t)blockIdx.x * (gridDim.y + groups) * quads;
  float4* of_groups = lists + (size_t)gridDim.y * quads;
  unsigned* counters = counter + blockIdx.x * (groups + 1);
  write_list(totals, lists + (size_t)blockIdx.y * quads, quads);
  if (!is_last(&counters[group], members)) return false;
  add_lists(lists + (size_t)group * GROUP * quads, members, quads, totals);
  write_list(totals, of_groups + (size_t)group * quads, quads);
  if (!is_last(&counters[groups], groups)) return false;
  add_lists(of_groups, groups, quads, totals);
  return true;
}

// The position of a block's threads in the tensor.
struct Place {
  int vectors, column, first, step;
  bool in;
  __device__ Place(int channels, int lanes) {
    vectors = channels / N;
    column = blockIdx.x * lanes + threadIdx.x % lanes;
    in = column < vectors;
    first = blockIdx.y * (THREADS / lanes) + threadIdx.x / lanes;
    step = gridDim.y * (THREADS / lanes);
  }
  __device__ size_t of(int row) const { return (size_t)row * vectors + column; }
};

__device__ void add_up(const Vec* __restrict__ x, const Place& at, int rows, float (&sum)[N], float (&squares)[N]) {
  if (!at.in) return;
  Vec base = x[at.column];
  for (int row = at.first; row < rows; row += AT_ONCE * at.step) {
    Vec v[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) v[u] = row + u * at.step < rows ? x[at.of(row + u * at.step)] : base;
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      for (int i = 0; i < N; ++i) {
        float d = to_float(v[u].at[i]) - to_float(base.at[i]);
        sum[i] += d;
        squares[i] += d * d;
      }
    }
  }
}

__device__ void finish_stats(const T* x, const float* weight, const float* bias, Running running, float* all, const float* totals, int rows,
                             int channels, int lanes, float momentum, float eps) {
  int width = lanes * N;
  Channels c(all, channels);
  for (int place = threadIdx.x; place < width; place += THREADS) {
    int channel = blockIdx.x * width + place;
    if (channel >= channels) break;
    Norm norm(to_float(x[channel]), totals[place], totals[width + place], weight[channel], bias[channel], rows, eps);
    norm.keep(c, running, channel, rows, momentum);
  }
}

// With a sum, a bit is saved for each element: whether the ReLU kept it.
template <int MODE>
__device__ void apply(const Vec* __restrict__ x, const Vec* __restrict__ other, Vec* __restrict__ y, u8* __restrict__ mask, const float* all,
                      int rows, int channels, int lanes) {
  Place at(channels, lanes);
  if (!at.in) return;
  Channels c((float*)all, channels);
  Own scale(c.scale, at.column), shift(c.shift, at.column);
  for (int row = at.first; row < rows; row += AT_ONCE * at.step) {
    Vec v[AT_ONCE], o[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (row + u * at.step >= rows) break;
      v[u] = x[at.of(row + u * at.step)];
      if (MODE == SUM) o[u] = other[at.of(row + u * at.step)];
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (row + u * at.step >= rows) break;
      unsigned bits = 0;
      for (int i = 0; i < N; ++i) {
        float z = fmaf(to_float(v[u].at[i]), scale.at[i], shift.at[i]);
        if (MODE == SUM) z += to_float(o[u].at[i]);
        if (MODE != PLAIN) z = relu(z);
        bits |= is_through(z) << i;
        from_float(v[u].at[i], z);
      }
      y[at.of(row + u * at.step)] = v[u];
      if (MODE == SUM) mask[at.of(row + u * at.step)] = bits;
    }
  }
}

template <int MODE>
__device__ void add_up_gradients(Gradients from, const Place& at, const Channels& c, int rows, float (&sum)[N], float (&product)[N]) {
  if (!at.in) return;
  const Vec *__restrict__ dy = from.dy, *__restrict__ dy2 = from.dy2, *__restrict__ x = from.x;
  const u8* __restrict__ mask = from.mask;
  Vec* __restrict__ g = from.g;
  Own mean(c.mean, at.column), scale(c.scale, at.column), shift(c.shift, at.column);
  for (int row = at.first; row < rows; row += AT_ONCE * at.step) {
    Vec d[AT_ONCE], e[AT_ONCE], v[AT_ONCE];
    unsigned bits[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (row + u * at.step >= rows) break;
      size_t place = at.of(row + u * at.step);
      d[u] = dy[place];
      v[u] = x[place];
      if (MODE == SUM) bits[u] = mask[place];
      if (MODE == SUM && dy2) e[u] = dy2[place];
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (row + u * at.step >= rows) break;
      for (int i = 0; i < N; ++i) {
        float value = to_float(v[u].at[i]), grad = to_float(d[u].at[i]);
        if (MODE == RELU) grad = is_through(fmaf(value, scale.at[i], shift.at[i])) ? grad : 0.f;
        if (MODE == SUM) {
          if (dy2) grad += to_float(e[u].at[i]);
          grad = bits[u] >> i & 1 ? grad : 0.f;
          from_float(d[u].at[i], grad);
        }
        sum[i] += grad;
        product[i] += grad * (value - mean.at[i]);
      }
      if (MODE == SUM) g[at.of(row + u * at.step)] = d[u];
    }
  }
}

__device__ void finish_sums(const float* weight, float* dweight, float* dbias, const Channels& c, const float* totals, int rows, int channels,
                            int lanes) {
  int width = lanes * N;
  for (int place = threadIdx.x; place < width; place += THREADS) {
    int channel = blockIdx.x * width + place;
    if (channel >= channels) break;
    float inv = c.inverse[channel], of_g = totals[place], of_product = totals[width + place] * inv;
    dbias[channel] = of_g;
    dweight[channel] = of_product;
    Slope slope(weight[channel], c.mean[channel], inv, of_g, of_product, rows);
    c.a[channel] = slope.a;
    c.b[channel] = slope.b;
    c.c[channel] = slope.c;
  }
}

// With a sum, `dy` is `g`, which is already masked.
template <int MODE>
__device__ void input(const Vec* __restrict__ dy, const Vec* __restrict__ x, Vec* __restrict__ dx, const float* all, int rows, int channels,
                      int lanes) {
  Place at(channels, lanes);
  if (!at.in) return;
  Channels c((float*)all, channels);
  Own a(c.a, at.column), b(c.b, at.column), k(c.c, at.column), scale(c.scale, at.column), shift(c.shift, at.column);
  for (int row = at.first; row < rows; row += AT_ONCE * at.step) {
    Vec d[AT_ONCE], v[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (row + u * at.step >= rows) break;
      d[u] = dy[at.of(row + u * at.step)];
      v[u] = x[at.of(row + u * at.step)];
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (row + u * at.step >= rows) break;
      for (int i = 0; i < N; ++i) {
        float value = to_float(v[u].at[i]), grad = to_float(d[u].at[i]);
        if (MODE == RELU) grad = is_through(fmaf(value, scale.at[i], shift.at[i])) ? grad : 0.f;
        from_float(d[u].at[i], fmaf(grad, a.at[i], fmaf(value, b.at[i], k.at[i])));
      }
      dx[at.of(row + u * at.step)] = d[u];
    }
  }
}

#define KERNEL(name, blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks) name

KERNEL(stats, 4)(const Vec* x, const float* weight, const float* bias, float* mean, float* var, long long* batches, float* all, float* partial,
              unsigned* counter, int rows, int channels, int lanes, float momentum, float eps) {
  __shared__ __align__(16) float totals[2 * THREADS];
  float sum[N] = {}, squares[N] = {};
  add_up(x, Place(channels, lanes), rows, sum, squares);
  if (!total(sum, squares, lanes, partial, counter, totals)) return;
  finish_stats((const T*)x, weight, bias, Running{mean, var, batches}, all, totals, rows, channels, lanes, momentum, eps);
}

#define KERNELS(mode, MODE)                                                                                                                 \
  KERNEL(apply_##mode, 2)(const Vec* x, const Vec* other, Vec* y, u8* mask, const float* all, int rows, int channels, int lanes) {          \
    apply<MODE>(x, other, y, mask, all, rows, channels, lanes);                                                                             \
  }                                                                                                                                         \
  KERNEL(sums_##mode, 2)(const Vec* dy, const Vec* dy2, const Vec* x, const u8* mask, Vec* g, const float* weight, float* dweight,          \
                         float* dbias, float* all, float* partial, unsigned* counter, int rows, int channels, int lanes) {                  \
    __shared__ __align__(16) float totals[2 * THREADS];                                                                                     \
    Channels c(all, channels);                                                                                                              \
    float sum[N] = {}, product[N] = {};                                                                                                     \
    add_up_gradients<MODE>(Gradients{dy, dy2, x, mask, g}, Place(channels, lanes), c, rows, sum, product);                                  \
    if (total(sum, product, lanes, partial, counter, totals)) finish_sums(weight, dweight, dbias, c, totals, rows, channels, lanes);        \
  }                                                                                                                                         \
  KERNEL(input_##mode, 2)(const Vec* dy, const Vec* x, Vec* dx, const float* all, int rows, int channels, int lanes) {                      \
    input<MODE>(dy, x, dx, all, rows, channels, lanes);                                                                                     \
  }

KERNELS(plain, PLAIN)
KERNELS(relu, RELU)
KERNELS(sum, SUM)
