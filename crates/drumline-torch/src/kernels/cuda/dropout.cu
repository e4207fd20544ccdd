// Dropout: alone, of a ReLU, or added to something. A thread has V elements of a sample at a time. `base` may be f32 while
// the rest has 16 bits.

template <class E, int V> struct alignas(sizeof(E) * V) Some { E at[V]; };

enum Kind { ALONE, OF_RELU, WHERE_POSITIVE };

template <int V, class B, Kind KIND>
__device__ void drop(const Mask& mask, const T* __restrict__ xs, const B* __restrict__ base, B* __restrict__ out, int samples) {
  Seeds step = of_step(mask);
  long long vectors = mask.per_sample / V;
  for (int sample = blockIdx.y; sample < samples; sample += gridDim.y) {
    Seeds seeds = of_sample(mask, step, sample);
    long long begin = sample * vectors;
    for (long long v = blockIdx.x * (long long)THREADS + threadIdx.x; v < vectors; v += gridDim.x * (long long)THREADS) {
      Some<T, V> x = ((const Some<T, V>*)xs)[begin + v];
      Some<B, V> more = {}, y;
      if (base) more = ((const Some<B, V>*)base)[begin + v];
      float factors[V];
      if (KIND != WHERE_POSITIVE) factors_of<V>(mask, seeds, v * V, factors);
      for (int i = 0; i < V; ++i) {
        float value = to_float(x.at[i]), other = to_float(more.at[i]);
        if (KIND == ALONE) value = other + value * factors[i];
        // NaN stays NaN.
        if (KIND == OF_RELU) value = value < 0 ? 0.f : value * factors[i];
        if (KIND == WHERE_POSITIVE) value = other > 0 ? value * mask.scale : 0.f;
        from_float(y.at[i], value);
      }
      ((Some<B, V>*)out)[begin + v] = y;
    }
  }
}

#define DROP(name, V, B, KIND)                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      name(const Mask mask, const T* xs, const B* base, B* out, int samples) {                                     \
    drop<V, B, KIND>(mask, xs, base, out, samples);                                                                \
  }

DROP(drop_same, N, T, ALONE)
DROP(drop_same_one, 1, T, ALONE)
DROP(drop_float, N, float, ALONE)
DROP(drop_float_one, 1, float, ALONE)
DROP(relu_drop, N, T, OF_RELU)
DROP(relu_drop_one, 1, T, OF_RELU)
DROP(where_positive, N, T, WHERE_POSITIVE)
DROP(where_positive_one, 1, T, WHERE_POSITIVE)
