// A convolution of 7 x 7 pixels with stride 2 and padding 3, as one of 4 x 4 pixels on images of half the size: the
// four pixels of a square become channels of one pixel. Three channels, too few for tensor cores, become twelve, and
// four of zeros.
//
//   row 2y + i - 3 of the image, i = 0 … 6   is   row y + a of the squares, two of zeros before them, and p within it: i + 1 = 2a + p

const int CHANNELS = 3, FOLDED = 16, EDGE = 7, HALF = 4, BEFORE = 2;

// The folded position of a weight, or -1 for weights that are zero.
__device__ inline int channel_of(int folded, int& p, int& q) {
  p = folded / CHANNELS / 2, q = folded / CHANNELS % 2;
  return folded < 4 * CHANNELS ? folded % CHANNELS : -1;
}

struct Strides { int image, channel, row, column; };

// A thread writes all folded channels of one pixel.
template <class From>
__device__ void fold(const From* __restrict__ images, Vec* __restrict__ to, Strides by, int count, int height, int width) {
  int out_height = height / 2 + 3, out_width = width / 2 + 3;
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= count * out_height * out_width) return;
  int x = thread % out_width - BEFORE, y = thread / out_width % out_height - BEFORE, image = thread / out_width / out_height;
  Vec out[FOLDED / N];
  bool is_in = x >= 0 && y >= 0 && 2 * x < width && 2 * y < height;
  for (int k = 0; k < FOLDED; ++k) {
    int p, q, channel = channel_of(k, p, q);
    float value = 0;
    if (is_in && channel >= 0) {
      value = to_float(images[(size_t)image * by.image + channel * by.channel + (2 * y + p) * by.row + (2 * x + q) * by.column]);
    }
    from_float(out[k / N].at[k % N], value);
  }
  for (int v = 0; v < FOLDED / N; ++v) to[(size_t)thread * (FOLDED / N) + v] = out[v];
}

#define FOLD(name, From)                                                                                                                \
  extern "C" __global__ void __launch_bounds__(256)                                                                                     \
      name(const From* images, Vec* to, int image, int channel, int row, int column, int count, int height, int width) {                \
    fold(images, to, Strides{image, channel, row, column}, count, height, width);                                                       \
  }
FOLD(fold_same, T)
FOLD(fold_float, float)

// Folds outputs x 3 x 7 x 7, with any strides, to outputs x 4 x 4 x 16.
template <class From>
__device__ void fold_weight(const From* weight, T* to, Strides by, int outputs) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= outputs * HALF * HALF * FOLDED) return;
  int p, q, channel = channel_of(thread % FOLDED, p, q);
  int b = thread / FOLDED % HALF, a = thread / FOLDED / HALF % HALF, output = thread / FOLDED / HALF / HALF;
  int row = 2 * a + p - 1, column = 2 * b + q - 1;
  bool is_in = channel >= 0 && row >= 0 && row < EDGE && column >= 0 && column < EDGE;
  from_float(to[thread], is_in ? to_float(weight[output * by.image + channel * by.channel + row * by.row + column * by.column]) : 0.f);
}

// The inverse, for the gradient.
template <class To>
__device__ void unfold_weight(const T* folded, To* to, Strides by, int outputs) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= outputs * CHANNELS * EDGE * EDGE) return;
  int column = thread % EDGE, row = thread / EDGE % EDGE, channel = thread / EDGE / EDGE % CHANNELS, output = thread / EDGE / EDGE / CHANNELS;
  int a = (row + 1) / 2, p = (row + 1) % 2, b = (column + 1) / 2, q = (column + 1) % 2;
  float value = to_float(folded[((output * HALF + a) * HALF + b) * FOLDED + (2 * p + q) * CHANNELS + channel]);
  from_float(to[output * by.image + channel * by.channel + row * by.row + column * by.column], value);
}

#define WEIGHT(name, Type)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                                     \
      fold_weight_##name(const Type* weight, T* to, int output, int channel, int row, int column, int outputs) {                        \
    fold_weight(weight, to, Strides{output, channel, row, column}, outputs);                                                            \
  }                                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                                                                     \
      unfold_weight_##name(const T* folded, Type* to, int output, int channel, int row, int column, int outputs) {                      \
    unfold_weight(folded, to, Strides{output, channel, row, column}, outputs);                                                          \
  }
WEIGHT(same, T)
WEIGHT(float, float)
