// Steps of optimizers with the numbers of our CPU kernels: compiled without approximations and without fused
// multiply-add, each operation rounds as it does on a CPU.
//
// A launch processes up to LISTED tensors. Each is cut in spans of up to 256 elements of one row; a tensor without
// blocks of 8-bit codes is one row. A warp steps a span, 8 elements in each lane, and a block of threads SPANS spans.
//
//   WEIGHTS  0 f32   1 f32, rounded to T as well   2 split: the high half is a bf16 number, the low one has 16 bits
//   MEANS    0 f32   1 bf16, rounded by random bits   2 codes of 8 bits
//
// LISTED, SPANS, THREADS, WEIGHTS and MEANS are defined when this is compiled, and with MEANS 2 the arrays
// `signed_map` and `unsigned_map`.

typedef unsigned int u32;
typedef unsigned long long u64;

#if WEIGHTS == 2
typedef u16 Weight;
#else
typedef float Weight;
#endif
#if MEANS == 0
typedef float Mean;
#elif MEANS == 1
typedef u16 Mean;
#else
typedef u8 Mean;
#endif

struct Tensors {
  Weight* weights[LISTED];
  void* twin[LISTED];  // what weights are rounded into, or their low halves
  Mean* first[LISTED];
  Mean* second[LISTED];
  float* first_absmax[LISTED];
  float* second_absmax[LISTED];
  float* step[LISTED];
  const T* grad[LISTED];
  u64 first_element[LISTED];  // its index in the whole tensor
  long long count[LISTED];
  long long row_len[LISTED];
  u32 random[LISTED];  // of the tensor's name
  u32 begin[LISTED];   // the first block of each
  long long listed;
};

// Eight elements of a lane: neighbours if the whole span is read in vectors, else 32 apart.
struct Lane {
  long long at;
  int count;
  bool in_vectors;
  __device__ long long element(int j) const { return at + (in_vectors ? j : 32 * j); }
};

template <typename E>
struct alignas(sizeof(E) == 1 ? 8 : 16) Pack { E at[sizeof(E) == 4 ? 4 : 8]; };

template <typename E>
__device__ inline void read(E (&to)[8], const E* from, const Lane& lane) {
  const int each = sizeof(Pack<E>) / sizeof(E);
  if (lane.in_vectors) {
#pragma unroll
    for (int part = 0; part < 8 / each; ++part) {
      Pack<E> pack = reinterpret_cast<const Pack<E>*>(from + lane.at)[part];
#pragma unroll
      for (int j = 0; j < each; ++j) to[part * each + j] = pack.at[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = j < lane.count ? from[lane.at + 32 * j] : E{};
  }
}

template <typename E>
__device__ inline void write(E* to, const E (&from)[8], const Lane& lane) {
  const int each = sizeof(Pack<E>) / sizeof(E);
  if (lane.in_vectors) {
#pragma unroll
    for (int part = 0; part < 8 / each; ++part) {
      Pack<E> pack;
#pragma unroll
      for (int j = 0; j < each; ++j) pack.at[j] = from[part * each + j];
      reinterpret_cast<Pack<E>*>(to + lane.at)[part] = pack;
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < lane.count) to[lane.at + 32 * j] = from[j];
    }
  }
}

__device__ inline bool is_nan(u32 bits) { return (bits & 0x7fffffff) > 0x7f800000; }

__device__ inline float widened(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ inline float joined(u16 high, u16 low) {
  u32 bits = (u32)high << 16;
  u32 rest = is_nan(bits) ? (u32)low : (u32)(int)(short)low;
  return __uint_as_float(bits + rest);
}

__device__ inline u16 high_of(float number) {
  u32 bits = __float_as_uint(number);
  return is_nan(bits) ? (bits >> 16) | 0x40 : (bits + 0x8000) >> 16;
}

__device__ inline u16 nearest_by_chance(float number, u32 random) {
  u32 bits = __float_as_uint(number);
  return is_nan(bits) ? 0x7fc0 : (bits + (random & 0xffff)) >> 16;
}

__device__ inline u32 mix(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ (x >> 16);
}

// The tensor of this block of threads.
__device__ inline int tensor_of(const Tensors& all) {
  int tensor = 0;
  while (tensor + 1 < all.listed && all.begin[tensor + 1] <= blockIdx.x) ++tensor;
  return tensor;
}

// One tensor of a launch.
struct Place {
  Weight* weights;
  void* twin;
  Mean* first;
  Mean* second;
  float* first_absmax;
  float* second_absmax;
  const T* grad;
  long long count, row_len, spans_in_row, num_spans, first_span;
  u64 first_element;
  bool is_aligned;
};

__device__ inline Place place_of(const Tensors& all, int tensor) {
  Place place = {all.weights[tensor], all.twin[tensor], all.first[tensor], all.second[tensor],
                 all.first_absmax[tensor], all.second_absmax[tensor], all.grad[tensor], all.count[tensor],
                 all.row_len[tensor]};
  place.spans_in_row = (place.row_len + 255) / 256;
  place.num_spans = place.count / place.row_len * place.spans_in_row;
  place.first_span = (long long)(blockIdx.x - all.begin[tensor]) * SPANS;
  place.first_element = all.first_element[tensor];
  u64 all_bits = (u64)place.weights | (u64)place.twin | (u64)place.first | (u64)place.second | (u64)place.grad;
  place.is_aligned = (all_bits & 15) == 0;
  return place;
}

// What a lane steps in a span.
__device__ inline Lane lane_of(const Place& place, long long span) {
  long long row = span / place.spans_in_row, column = (span - row * place.spans_in_row) * 256;
  long long from = row * place.row_len + column, rest = place.row_len - column;
  int len = rest < 256 ? (int)rest : 256, lane = threadIdx.x % 32;
  bool in_vectors = place.is_aligned && len == 256 && from % 8 == 0;
  if (in_vectors) return {from + lane * 8, 8, true};
  return {from + lane, lane < len ? (len - lane + 31) / 32 : 0, false};
}

__device__ inline void read_grads(float (&g)[8], const Place& place, const Lane& lane, float factor) {
  T grads[8];
  read(grads, place.grad, lane);
#pragma unroll
  for (int j = 0; j < 8; ++j) g[j] = to_float(grads[j]) * factor;
}

__device__ inline void read_weights(float (&w)[8], const Place& place, const Lane& lane) {
#if WEIGHTS == 2
  u16 high[8], low[8];
  read(high, place.weights, lane);
  read(low, (const u16*)place.twin, lane);
#pragma unroll
  for (int j = 0; j < 8; ++j) w[j] = joined(high[j], low[j]);
#else
  read(w, place.weights, lane);
#endif
}

__device__ inline void write_weights(const Place& place, const float (&w)[8], const Lane& lane) {
#if WEIGHTS == 2
  u16 high[8], low[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    high[j] = high_of(w[j]);
    low[j] = (u16)__float_as_uint(w[j]);
  }
  write(place.weights, high, lane);
  write((u16*)place.twin, low, lane);
#else
  write(place.weights, w, lane);
#if WEIGHTS == 1
  T rounded[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) from_float(rounded[j], w[j]);
  write((T*)place.twin, rounded, lane);
#endif
#endif
}

// Counts a step that was not skipped; one thread for each tensor.
extern "C" __global__ void count_step(const Tensors all, const float* found_inf) {
  if (threadIdx.x < all.listed && !(found_inf != nullptr && *found_inf != 0)) {
    *all.step[threadIdx.x] += 1;
  }
}
