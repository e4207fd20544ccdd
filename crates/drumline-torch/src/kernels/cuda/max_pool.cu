// Max pooling with a 3 x 3 window, stride 2 and padding 1, in channels last (NHWC). Forward saves which of the nine
// pixels was the maximum; backward visits for each pixel the windows that contain it, up to four.

const int EDGE = 3, STRIDE = 2, PADDING = 1;

// A thread's pixel and its vector of channels.
struct Pixel {
  int column, x, y;
  size_t image;
  __device__ Pixel(size_t thread, int vectors, int height, int width) {
    column = thread % vectors;
    size_t pixel = thread / vectors;
    x = pixel % width;
    y = pixel / width % height;
    image = pixel / width / height;
  }
};

__device__ inline size_t place(size_t image, int y, int x, int column, int height, int width, int vectors) {
  return ((image * height + y) * width + x) * vectors + column;
}

extern "C" __global__ void __launch_bounds__(256)
    max_pool(const Vec* __restrict__ from, Vec* __restrict__ to, Bytes* __restrict__ which, long long threads, int height, int width, int out_height,
             int out_width, int vectors) {
  size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= threads) return;
  Pixel at(thread, vectors, out_height, out_width);
  float best[N];
  Bytes found;
  for (int i = 0; i < N; ++i) best[i] = -INFINITY, found.at[i] = 0;
  Vec seen[EDGE * EDGE];
#pragma unroll
  for (int k = 0; k < EDGE * EDGE; ++k) {
    int y = at.y * STRIDE - PADDING + k / EDGE, x = at.x * STRIDE - PADDING + k % EDGE;
    if (y >= 0 && y < height && x >= 0 && x < width) seen[k] = from[place(at.image, y, x, at.column, height, width, vectors)];
  }
#pragma unroll
  for (int k = 0; k < EDGE * EDGE; ++k) {
    int y = at.y * STRIDE - PADDING + k / EDGE, x = at.x * STRIDE - PADDING + k % EDGE;
    if (y < 0 || y >= height || x < 0 || x >= width) continue;
    for (int i = 0; i < N; ++i) {
      float value = to_float(seen[k].at[i]);
      // As in libtorch, NaN is the maximum.
      if (value > best[i] || isnan(value)) best[i] = value, found.at[i] = k;
    }
  }
  Vec out;
  for (int i = 0; i < N; ++i) from_float(out.at[i], best[i]);
  to[thread] = out;
  which[thread] = found;
}

extern "C" __global__ void __launch_bounds__(256)
    max_pool_backward(const Vec* __restrict__ grad, const Bytes* __restrict__ which, Vec* __restrict__ to, long long threads, int height, int width,
                      int out_height, int out_width, int vectors) {
  size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= threads) return;
  Pixel at(thread, vectors, height, width);
  float sum[N] = {};
  // The first window that contains this pixel, in each direction; the next one may contain it, too.
  int y = (at.y + PADDING - EDGE + STRIDE) / STRIDE, x = (at.x + PADDING - EDGE + STRIDE) / STRIDE;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    int oy = y + k / 2, ox = x + k % 2;
    int dy = at.y + PADDING - oy * STRIDE, dx = at.x + PADDING - ox * STRIDE;
    if (dy < 0 || dx < 0 || oy >= out_height || ox >= out_width) continue;
    size_t window = place(at.image, oy, ox, at.column, out_height, out_width, vectors);
    Vec g = grad[window];
    Bytes found = which[window];
    for (int i = 0; i < N; ++i) sum[i] += found.at[i] == dy * EDGE + dx ? to_float(g.at[i]) : 0.f;
  }
  Vec out;
  for (int i = 0; i < N; ++i) from_float(out.at[i], sum[i]);
  to[thread] = out;
}
