// Batch normalisation with what comes after it, on channels that lie side by side (NHWC): a row is a pixel of a sample.
//
//   forward    stats: sums of each channel; the last block makes of them mean, scale and shift      apply: y = act(x * scale + shift [+ r])
//   backward   sums: of the gradient, and of it times the normalised x; the last block makes of them dx = g * a + x * b + c      input: dx
//
// A thread takes 16 bytes: some channels of a row, always the same ones, and goes through the rows. A block is `lanes` such columns
// wide and 256 / lanes rows high. Sums are taken relative to the first row, so that a large mean costs no digits. They are added up in the
// same order every time.

typedef unsigned short u16;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline float to_float(float x) { return x; }
__device__ inline void from_float(bf16& to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ inline void from_float(f16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ inline void from_float(float& to, float x) { to = x; }

template <class T> struct alignas(16) Vec {
  static const int N = 16 / sizeof(T);
  T at[N];
};

// Numbers of each channel, one array after the other.
struct Channels {
  float *mean, *inverse, *scale, *shift, *a, *b, *c;
  __device__ Channels(float* all, int count)
      : mean(all), inverse(all + count), scale(all + 2 * count), shift(all + 3 * count), a(all + 4 * count), b(all + 5 * count), c(all + 6 * count) {}
};

const int THREADS = 256;

// Adds up two sums of each channel over the block's rows: `totals` has those of the block's first kind, then those of the second.
template <int N>
__device__ void total_of_block(const float (&first)[N], const float (&second)[N], int lanes, float* totals) {
  __shared__ float kept[2][THREADS * N];
  int lane = threadIdx.x % lanes, row = threadIdx.x / lanes, rows = THREADS / lanes, width = lanes * N;
  for (int i = 0; i < N; ++i) {
    kept[0][row * width + lane * N + i] = first[i];
    kept[1][row * width + lane * N + i] = second[i];
  }
  __syncthreads();
  // Halves are added to halves until few rows are left.
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

// The same over all blocks of these channels; true in the last one, whose `totals` then are those of all.
template <int N>
__device__ bool total(const float (&first)[N], const float (&second)[N], int lanes, float* partial, unsigned* counter, float* totals) {
  __shared__ bool is_last;
  __shared__ float4 shares[THREADS];
  total_of_block<N>(first, second, lanes, totals);
  int quads = 2 * lanes * N / 4;
  float4* own = (float4*)partial + (size_t)blockIdx.x * gridDim.y * quads;
  for (int quad = threadIdx.x; quad < quads; quad += THREADS) own[(size_t)blockIdx.y * quads + quad] = ((float4*)totals)[quad];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&counter[blockIdx.x], 1u) == gridDim.y - 1;
  __syncthreads();
  if (!is_last) return false;
  // As many blocks' sums side by side as there are threads.
  int quad = threadIdx.x % quads, side = THREADS / quads;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int block = threadIdx.x / quads; block < gridDim.y; block += side) {
    float4 next = __ldcg(&own[(size_t)block * quads + quad]);
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
  if (threadIdx.x == 0) counter[blockIdx.x] = 0;
  return true;
}

struct Running {
  float *mean, *var;
  long long* batches;
};

// Where a block's threads are in the tensor.
template <class T>
struct Place {
  int vectors, column, first, step;
  bool in;
  __device__ Place(int channels, int lanes) {
    vectors = channels / Vec<T>::N;
    column = blockIdx.x * lanes + threadIdx.x % lanes;
    in = column < vectors;
    first = blockIdx.y * (THREADS / lanes) + threadIdx.x / lanes;
    step = gridDim.y * (THREADS / lanes);
  }
};

template <class T>
__device__ void add_up(const T* x, const Place<T>& at, int rows, float (&sum)[Vec<T>::N], float (&squares)[Vec<T>::N]) {
  typedef Vec<T> V;
  if (!at.in) return;
  const V* from = (const V*)x + at.column;
  V base = from[0];
#pragma unroll 4
  for (int row = at.first; row < rows; row += at.step) {
    V v = from[(size_t)row * at.vectors];
    for (int i = 0; i < V::N; ++i) {
      float d = to_float(v.at[i]) - to_float(base.at[i]);
      sum[i] += d;
      squares[i] += d * d;
    }
  }
}

template <class T>
__device__ void finish_stats(const T* x, const float* weight, const float* bias, Running running, float* all, const float* totals, int rows,
                             int channels, int lanes, float momentum, float eps) {
  int width = lanes * Vec<T>::N;
  Channels c(all, channels);
  for (int place = threadIdx.x; place < width; place += THREADS) {
    int channel = blockIdx.x * width + place;
    if (channel >= channels) break;
    float off = totals[place] / rows, var = fmaxf(totals[width + place] / rows - off * off, 0.f);
    float mean = to_float(x[channel]) + off, inverse = rsqrtf(var + eps);
    c.mean[channel] = mean;
    c.inverse[channel] = inverse;
    c.scale[channel] = weight[channel] * inverse;
    c.shift[channel] = bias[channel] - mean * weight[channel] * inverse;
    if (running.mean) {
      running.mean[channel] += momentum * (mean - running.mean[channel]);
      float unbiased = rows > 1 ? var * ((float)rows / (float)(rows - 1)) : var;
      running.var[channel] += momentum * (unbiased - running.var[channel]);
    }
  }
  if (running.batches && blockIdx.x == 0 && threadIdx.x == 0) ++*running.batches;
}

template <class T>
__device__ void stats(const T* x, const float* weight, const float* bias, Running running, float* all, float* partial, unsigned* counter,
                      int rows, int channels, int lanes, float momentum, float eps) {
  __shared__ __align__(16) float totals[2 * THREADS];
  float sum[Vec<T>::N] = {}, squares[Vec<T>::N] = {};
  add_up<T>(x, Place<T>(channels, lanes), rows, sum, squares);
  if (!total<Vec<T>::N>(sum, squares, lanes, partial, counter, totals)) return;
  finish_stats<T>(x, weight, bias, running, all, totals, rows, channels, lanes, momentum, eps);
}

// `mode`: 1 adds the other tensor, 2 is a ReLU.
template <class T>
__device__ void apply(const T* x, const T* other, T* y, const float* all, int rows, int channels, int lanes, int mode) {
  typedef Vec<T> V;
  Place<T> at(channels, lanes);
  if (!at.in) return;
  Channels c((float*)all, channels);
  float scale[V::N], shift[V::N];
  for (int i = 0; i < V::N; ++i) scale[i] = c.scale[at.column * V::N + i], shift[i] = c.shift[at.column * V::N + i];
#pragma unroll 4
  for (int row = at.first; row < rows; row += at.step) {
    size_t place = (size_t)row * at.vectors + at.column;
    V v = ((const V*)x)[place], o, out;
    if (mode & 1) o = ((const V*)other)[place];
    for (int i = 0; i < V::N; ++i) {
      float z = fmaf(to_float(v.at[i]), scale[i], shift[i]);
      if (mode & 1) z += to_float(o.at[i]);
      if (mode & 2) z = fmaxf(z, 0.f);
      from_float(out.at[i], z);
    }
    ((V*)y)[place] = out;
  }
}

// Where the other tensor was added, the ReLU's mask is known from y, and `g`, the gradient behind it, is what the other tensor gets.
template <class T>
__device__ void add_up_gradients(const T* dy, const T* x, const T* y, T* g, const Place<T>& at, const Channels& c, int rows, int mode,
                                 float (&sum)[Vec<T>::N], float (&product)[Vec<T>::N]) {
  typedef Vec<T> V;
  if (!at.in) return;
  float mean[V::N], inverse[V::N], scale[V::N], shift[V::N];
  for (int i = 0; i < V::N; ++i) {
    int channel = at.column * V::N + i;
    mean[i] = c.mean[channel], inverse[i] = c.inverse[channel], scale[i] = c.scale[channel], shift[i] = c.shift[channel];
  }
#pragma unroll 4
  for (int row = at.first; row < rows; row += at.step) {
    size_t place = (size_t)row * at.vectors + at.column;
    V d = ((const V*)dy)[place], v = ((const V*)x)[place], o;
    if (mode == 3) o = ((const V*)y)[place];
    for (int i = 0; i < V::N; ++i) {
      float value = to_float(v.at[i]), grad = to_float(d.at[i]);
      if (mode & 2) {
        float z = (mode & 1) ? to_float(o.at[i]) : fmaf(value, scale[i], shift[i]);
        grad = z > 0.f ? grad : 0.f;
      }
      if (mode == 3) from_float(o.at[i], grad);
      sum[i] += grad;
      product[i] += grad * ((value - mean[i]) * inverse[i]);
    }
    if (mode == 3) ((V*)g)[place] = o;
  }
}

template <class T>
__device__ void finish_sums(const float* weight, float* dweight, float* dbias, const Channels& c, const float* totals, int rows, int channels,
                            int lanes) {
  int width = lanes * Vec<T>::N;
  for (int place = threadIdx.x; place < width; place += THREADS) {
    int channel = blockIdx.x * width + place;
    if (channel >= channels) break;
    float of_g = totals[place], of_product = totals[width + place];
    dbias[channel] = of_g;
    dweight[channel] = of_product;
    float inv = c.inverse[channel], factor = weight[channel] * inv, b = -factor * inv * of_product / rows;
    c.a[channel] = factor;
    c.b[channel] = b;
    c.c[channel] = -factor * of_g / rows - b * c.mean[channel];
  }
}

template <class T>
__device__ void sums(const T* dy, const T* x, const T* y, T* g, const float* weight, float* dweight, float* dbias, float* all, float* partial,
                     unsigned* counter, int rows, int channels, int lanes, int mode) {
  __shared__ __align__(16) float totals[2 * THREADS];
  Channels c(all, channels);
  float sum[Vec<T>::N] = {}, product[Vec<T>::N] = {};
  add_up_gradients<T>(dy, x, y, g, Place<T>(channels, lanes), c, rows, mode, sum, product);
  if (!total<Vec<T>::N>(sum, product, lanes, partial, counter, totals)) return;
  finish_sums<T>(weight, dweight, dbias, c, totals, rows, channels, lanes);
}

template <class T>
__device__ void input(const T* dy, const T* x, T* dx, const float* all, int rows, int channels, int lanes, int mode) {
  typedef Vec<T> V;
  Place<T> at(channels, lanes);
  if (!at.in) return;
  Channels c((float*)all, channels);
  float a[V::N], b[V::N], k[V::N], scale[V::N], shift[V::N];
  for (int i = 0; i < V::N; ++i) {
    int channel = at.column * V::N + i;
    a[i] = c.a[channel], b[i] = c.b[channel], k[i] = c.c[channel], scale[i] = c.scale[channel], shift[i] = c.shift[channel];
  }
#pragma unroll 4
  for (int row = at.first; row < rows; row += at.step) {
    size_t place = (size_t)row * at.vectors + at.column;
    V d = ((const V*)dy)[place], v = ((const V*)x)[place], out;
    for (int i = 0; i < V::N; ++i) {
      float value = to_float(v.at[i]), grad = to_float(d.at[i]);
      // With another tensor `dy` is `g`, masked already.
      if (mode == 2) grad = fmaf(value, scale[i], shift[i]) > 0.f ? grad : 0.f;
      from_float(out.at[i], fmaf(grad, a[i], fmaf(value, b[i], k[i])));
    }
    ((V*)dx)[place] = out;
  }
}

// Small tensors: a block has all rows of its channels, so that one kernel does both passes. What the first has read is near.
template <class T>
__device__ void whole_forward(const T* x, const T* other, T* y, const float* weight, const float* bias, Running running, float* all, int rows,
                              int channels, int lanes, int mode, float momentum, float eps) {
  __shared__ __align__(16) float totals[2 * THREADS];
  float sum[Vec<T>::N] = {}, squares[Vec<T>::N] = {};
  add_up<T>(x, Place<T>(channels, lanes), rows, sum, squares);
  total_of_block<Vec<T>::N>(sum, squares, lanes, totals);
  finish_stats<T>(x, weight, bias, running, all, totals, rows, channels, lanes, momentum, eps);
  __syncthreads();
  apply<T>(x, other, y, all, rows, channels, lanes, mode);
}

template <class T>
__device__ void whole_backward(const T* dy, const T* x, const T* y, T* g, T* dx, const float* weight, float* dweight, float* dbias, float* all,
                               int rows, int channels, int lanes, int mode) {
  __shared__ __align__(16) float totals[2 * THREADS];
  Channels c(all, channels);
  float sum[Vec<T>::N] = {}, product[Vec<T>::N] = {};
  add_up_gradients<T>(dy, x, y, g, Place<T>(channels, lanes), c, rows, mode, sum, product);
  total_of_block<Vec<T>::N>(sum, product, lanes, totals);
  finish_sums<T>(weight, dweight, dbias, c, totals, rows, channels, lanes);
  __syncthreads();
  input<T>(mode == 3 ? g : dy, x, dx, all, rows, channels, lanes, mode);
}

#define KERNEL(name, T) extern "C" __global__ void __launch_bounds__(THREADS) name##_##T
#define KERNELS(T)                                                                                                                         \
  KERNEL(stats, T)(const T* x, const float* weight, const float* bias, float* mean, float* var, long long* batches, float* all,            \
                   float* partial, unsigned* counter, int rows, int channels, int lanes, float momentum, float eps) {                      \
    stats<T>(x, weight, bias, Running{mean, var, batches}, all, partial, counter, rows, channels, lanes, momentum, eps);                   \
  }                                                                                                                                        \
  KERNEL(apply, T)(const T* x, const T* other, T* y, const float* all, int rows, int channels, int lanes, int mode) {                      \
    apply<T>(x, other, y, all, rows, channels, lanes, mode);                                                                               \
  }                                                                                                                                        \
  KERNEL(sums, T)(const T* dy, const T* x, const T* y, T* g, const float* weight, float* dweight, float* dbias, float* all,                \
                  float* partial, unsigned* counter, int rows, int channels, int lanes, int mode) {                                        \
    sums<T>(dy, x, y, g, weight, dweight, dbias, all, partial, counter, rows, channels, lanes, mode);                                      \
  }                                                                                                                                        \
  KERNEL(input, T)(const T* dy, const T* x, T* dx, const float* all, int rows, int channels, int lanes, int mode) {                        \
    input<T>(dy, x, dx, all, rows, channels, lanes, mode);                                                                                 \
  }                                                                                                                                        \
  KERNEL(whole_forward, T)(const T* x, const T* other, T* y, const float* weight, const float* bias, float* mean, float* var,              \
                           long long* batches, float* all, int rows, int channels, int lanes, int mode, float momentum, float eps) {       \
    whole_forward<T>(x, other, y, weight, bias, Running{mean, var, batches}, all, rows, channels, lanes, mode, momentum, eps);             \
  }                                                                                                                                        \
  KERNEL(whole_backward, T)(const T* dy, const T* x, const T* y, T* g, T* dx, const float* weight, float* dweight, float* dbias,           \
                            float* all, int rows, int channels, int lanes, int mode) {                                                     \
    whole_backward<T>(dy, x, y, g, dx, weight, dweight, dbias, all, rows, channels, lanes, mode);                                          \
  }

KERNELS(bf16)
KERNELS(f16)
KERNELS(float)
