// The masks of dropout by position: the same bits as `masks.rs` and `kernels/dropout.rs` make on a CPU.

// The layout is that of `Mask` in dropout.rs.
struct Mask {
  const long long* step;
  // Elements of a sample, and the positions of samples in the step.
  long long per_sample;
  long long first, stride;
  unsigned keys[2];
  unsigned below;
  float scale;
};

struct Seeds { unsigned a, b; };

__device__ inline unsigned mix(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

__device__ inline unsigned fold(unsigned long long number) { return mix((unsigned)number ^ mix((unsigned)(number >> 32))); }

// What the masks of a step depend on.
__device__ inline Seeds of_step(const Mask& mask) {
  unsigned step = fold((unsigned long long)*mask.step);
  return {mix(mask.keys[0] ^ step), mix(mask.keys[1] + step * 0x9e3779b9u)};
}

__device__ inline Seeds of_sample(const Mask& mask, Seeds step, int nth) {
  unsigned sample = fold((unsigned long long)(mask.first + nth * mask.stride));
  return {mix(step.a + sample), mix(step.b ^ sample * 0x85ebca6bu)};
}

// The factors of V elements of a sample from `first` on, where V divides 16 and `first`: 32 elements share 16 words.
template <int V>
__device__ inline void factors_of(const Mask& mask, Seeds seeds, long long first, float* to) {
  unsigned word = (unsigned)(first / 32 * 16 + first % 16);
  int shift = first % 32 < 16 ? 0 : 16;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    unsigned bits = mix(mix((word + i) ^ seeds.a) + seeds.b);
    to[i] = (bits >> shift & 0xffff) < mask.below ? 0.f : mask.scale;
  }
}
