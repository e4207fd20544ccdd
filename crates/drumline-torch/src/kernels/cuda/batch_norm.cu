// Batch normalisation and the operations after it, in channels last (NHWC): a row is a pixel of a sample.
//
//   forward    sums of each channel ─▶ mean, scale and shift ─▶ y = act(x * scale + shift [+ other])
//   backward   sums of the gradient, and of it times the centred x ─▶ dx = g * a + x * b + c
//
// The kernels for large and for small tensors share this file. A thread processes a vector of 16 bytes: some channels
// of a row, always the same ones. Sums are relative to the first row, so that a large mean does not lose precision, and
// are added up in the same order every time.

// The operation after the normalisation: nothing, a ReLU, or a sum with another tensor and then a ReLU.
enum { PLAIN, RELU, SUM };

// The saved values of each channel, one array after the other.
struct Channels {
  float *mean, *inverse, *scale, *shift, *a, *b, *c;
  __device__ Channels(float* all, int count)
      : mean(all), inverse(all + count), scale(all + 2 * count), shift(all + 3 * count), a(all + 4 * count), b(all + 5 * count), c(all + 6 * count) {}
};

// The values of a thread's channels.
struct Own {
  float at[N];
  __device__ Own(const float* channels, int column) {
    for (int i = 0; i < N; ++i) at[i] = channels[column * N + i];
  }
};

struct Running {
  float *mean, *var;
  long long* batches;
};

// NaN stays NaN and passes its gradient, as in libtorch, so that a diverged network is visible.
__device__ inline float relu(float z) { return z <= 0.f ? 0.f : z; }
__device__ inline bool is_through(float z) { return !(z <= 0.f); }

// Computes the saved values of a channel from its sums, which are relative to its first value.
struct Norm {
  float mean, inverse, scale, shift, var;
  __device__ Norm(float base, float sum, float squares, float weight, float bias, int rows, float eps) {
    float off = sum / rows;
    var = fmaxf(squares / rows - off * off, 0.f);
    mean = base + off;
    inverse = rsqrtf(var + eps);
    scale = weight * inverse;
    shift = bias - mean * scale;
  }
  __device__ void keep(Channels c, Running running, int channel, int rows, float momentum) const {
    c.mean[channel] = mean;
    c.inverse[channel] = inverse;
    c.scale[channel] = scale;
    c.shift[channel] = shift;
    if (running.mean) {
      running.mean[channel] += momentum * (mean - running.mean[channel]);
      float unbiased = rows > 1 ? var * ((float)rows / (float)(rows - 1)) : var;
      running.var[channel] += momentum * (unbiased - running.var[channel]);
    }
    if (running.batches && channel == 0) ++*running.batches;
  }
};

// The gradient of a channel's input: g * a + x * b + c.
struct Slope {
  float a, b, c;
  __device__ Slope(float weight, float mean, float inverse, float of_g, float of_product, int rows) {
    a = weight * inverse;
    b = -a * inverse * of_product / rows;
    c = -a * of_g / rows - b * mean;
  }
};

struct Gradients {
  // The gradient of y; with a sum, also the gradient from its other use, or null.
  const Vec *dy, *dy2;
  const Vec* x;
  const u8* mask;
  // With a sum, the gradient before the ReLU, which is the gradient of the other tensor.
  Vec* g;
};
