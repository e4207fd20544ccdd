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

#if MEANS == 2
// The values of a map, the middles between its magnitudes, and by the upper bits of a magnitude the number of middles
// that are surely below it.
struct Map {
  const u32* words;
  __device__ float value(u8 code) const { return __uint_as_float(words[code]); }
  __device__ u32 place(float number) const {
    u32 bits = __float_as_uint(number) & 0x7fffffff, upper = bits >> 16;
    upper = upper < LOWEST ? LOWEST : upper > HIGHEST ? HIGHEST : upper;
    u32 place = reinterpret_cast<const u8*>(words + 512)[upper - LOWEST];
    return place + (__uint_as_float(bits) > __uint_as_float(words[256 + place]) ? 1 : 0);
  }
};

__device__ inline u8 code_of(const Map& map, float number, bool is_signed) {
  u32 place = map.place(number);
  if (!is_signed) return place;
  return number < 0 ? 127 - (place < 127 ? place : 127) : 127 + place;
}

__device__ inline void decode(float (&to)[8], const u8* codes, float absmax, const Map& map, const Lane& lane) {
  u8 all[8];
  read(all, codes, lane);
#pragma unroll
  for (int j = 0; j < 8; ++j) to[j] = map.value(all[j]) * absmax;
}

// Writes the codes of a span. Elements beyond its end are zero.
__device__ inline void encode(u8* codes, float* absmax, const float (&from)[8], const Map& map, bool is_signed,
                              const Lane& lane) {
  u32 greatest = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 bits = __float_as_uint(from[j]) & 0x7fffffff;
    if (j < lane.count && bits > greatest) greatest = bits;
  }
  for (int by = 16; by > 0; by /= 2) {
    u32 other = __shfl_xor_sync(0xffffffff, greatest, by);
    if (other > greatest) greatest = other;
  }
  float scale = __uint_as_float(greatest), divisor = scale == 0 ? 1 : scale;
  u8 all[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) all[j] = code_of(map, __fdiv_rn(from[j], divisor), is_signed);
  write(codes, all, lane);
  if (threadIdx.x % 32 == 0) *absmax = scale;
}

#define MAPS                                                                                        \
  __shared__ u32 words[2][MAP_WORDS];                                                               \
  for (int i = threadIdx.x; i < MAP_WORDS; i += THREADS) {                                          \
    words[0][i] = signed_map[i];                                                                    \
    words[1][i] = unsigned_map[i];                                                                  \
  }                                                                                                 \
  const Map signed_codes = {words[0]}, unsigned_codes = {words[1]};
#else
#define MAPS
#endif

struct Adam {
  float l2, kept, rest1, beta2, rest2, root, eps, step_size;
  u32 seed0, seed1;
};

// `lr_at` and `found_inf` may be null. State begins as zeros.
extern "C" __global__ void __launch_bounds__(THREADS) adam_step(
    const Tensors all, const double* lr_at, const float* found_inf, double lr, double beta1, double beta2, double eps,
    double weight_decay, int decoupled, float grad_factor, u32 random) {
  if (found_inf != nullptr && *found_inf != 0) return;
  int tensor = tensor_of(all);
  __shared__ Adam shared;
  if (threadIdx.x == 0) {
    double step = (double)*all.step[tensor] + 1;
    if (lr_at != nullptr) lr = *lr_at;
    shared.l2 = decoupled ? 0 : (float)weight_decay;
    shared.kept = decoupled ? (float)(1 - lr * weight_decay) : 1;
    shared.rest1 = (float)(1 - beta1);
    shared.beta2 = (float)beta2;
    shared.rest2 = (float)(1 - beta2);
    shared.root = (float)sqrt(1 - pow(beta2, step));
    shared.eps = (float)eps;
    shared.step_size = (float)(lr / (1 - pow(beta1, step)));
    u64 number = (u64)step;
    shared.seed0 = all.random[tensor];
    shared.seed1 = mix(random ^ mix((u32)number ^ mix((u32)(number >> 32))));
  }
  MAPS
  __syncthreads();
  const Adam with = shared;
  const Place place = place_of(all, tensor);
  for (int i = threadIdx.x / 32; i < SPANS; i += THREADS / 32) {
    long long span = place.first_span + i;
    if (span >= place.num_spans) return;
    Lane lane = lane_of(place, span);
    float w[8], g[8], m[8], v[8];
    read_weights(w, place, lane);
    read_grads(g, place, lane, grad_factor);
#if MEANS == 0
    read(m, place.first, lane);
    read(v, place.second, lane);
#elif MEANS == 1
    u16 first[8], second[8];
    read(first, place.first, lane);
    read(second, place.second, lane);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      m[j] = widened(first[j]);
      v[j] = widened(second[j]);
    }
#else
    decode(m, place.first, place.first_absmax[span], signed_codes, lane);
    decode(v, place.second, place.second_absmax[span], unsigned_codes, lane);
#endif
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float grad = with.l2 == 0 ? g[j] : g[j] + with.l2 * w[j];
      m[j] += with.rest1 * (grad - m[j]);
      v[j] = v[j] * with.beta2 + with.rest2 * grad * grad;
      float divisor = __fdiv_rn(__fsqrt_rn(v[j]), with.root) + with.eps;
      w[j] = w[j] * with.kept - __fdiv_rn(with.step_size * m[j], divisor);
    }
    write_weights(place, w, lane);
#if MEANS == 0
    write(place.first, m, lane);
    write(place.second, v, lane);
#elif MEANS == 1
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      u64 element = place.first_element + lane.element(j);
      u32 high = (u32)(element >> 32) * 0x9e3779b9;
      u32 bits = mix(mix((u32)element ^ with.seed0) + (with.seed1 ^ high));
      first[j] = nearest_by_chance(m[j], bits);
      second[j] = nearest_by_chance(v[j], bits >> 16);
    }
    write(place.first, first, lane);
    write(place.second, second, lane);
#else
    encode(place.first, place.first_absmax + span, m, signed_codes, true, lane);
    encode(place.second, place.second_absmax + span, v, unsigned_codes, false, lane);
#endif
  }
}

// Counts a step that was not skipped; one thread for each tensor.
extern "C" __global__ void count_step(const Tensors all, const float* found_inf) {
  if (threadIdx.x < all.listed && !(found_inf != nullptr && *found_inf != 0)) {
    *all.step[threadIdx.x] += 1;
  }
}

#if MEANS == 0
extern "C" __global__ void __launch_bounds__(THREADS) lion_step(
    const Tensors all, const double* lr_at, const float* found_inf, double lr, double beta1, double beta2,
    double weight_decay, float grad_factor) {
  if (found_inf != nullptr && *found_inf != 0) return;
  if (lr_at != nullptr) lr = *lr_at;
  const float kept = (float)(1 - lr * weight_decay), rate = (float)lr, by1 = (float)beta1, by2 = (float)beta2,
              rest1 = (float)(1 - beta1), rest2 = (float)(1 - beta2);
  const Place place = place_of(all, tensor_of(all));
  for (int i = threadIdx.x / 32; i < SPANS; i += THREADS / 32) {
    long long span = place.first_span + i;
    if (span >= place.num_spans) return;
    Lane lane = lane_of(place, span);
    float w[8], g[8], m[8];
    read_weights(w, place, lane);
    read_grads(g, place, lane, grad_factor);
    read(m, place.first, lane);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float between = m[j] * by1 + g[j] * rest1;
      float sign = (between > 0 ? 1.0f : 0.0f) - (between < 0 ? 1.0f : 0.0f);
      w[j] = w[j] * kept - rate * sign;
      m[j] = m[j] * by2 + g[j] * rest2;
    }
    write_weights(place, w, lane);
    write(place.first, m, lane);
  }
}

struct Direction { float correction1, root_of_correction2, eps, weight_decay; };

__device__ inline float direction_at(const Direction& with, float w, float mean, float square) {
  float divisor = __fdiv_rn(__fsqrt_rn(square), with.root_of_correction2) + with.eps;
  return __fdiv_rn(__fdiv_rn(mean, with.correction1), divisor) + with.weight_decay * w;
}

// LAMB's corrections: 0 of the means, 1 of the step size, 2 none.
__device__ inline Direction direction_of(double step, double beta1, double beta2, double eps, double weight_decay,
                                         int correction) {
  double first = correction == 0 ? 1 - pow(beta1, step) : 1, second = correction == 0 ? 1 - pow(beta2, step) : 1;
  return {(float)first, (float)sqrt(second), (float)eps, (float)weight_decay};
}

// Updates the means. `sums` gets the sums of squares of weights and direction, of each block of threads.
extern "C" __global__ void __launch_bounds__(THREADS) lamb_means(
    const Tensors all, const float* found_inf, double beta1, double beta2, double eps, double weight_decay,
    int correction, float grad_factor, double* sums) {
  if (found_inf != nullptr && *found_inf != 0) return;
  int tensor = tensor_of(all);
  __shared__ Direction shared;
  __shared__ double of_warps[2][THREADS / 32];
  if (threadIdx.x == 0) {
    shared = direction_of((double)*all.step[tensor] + 1, beta1, beta2, eps, weight_decay, correction);
  }
  __syncthreads();
  const Direction with = shared;
  const float rest1 = (float)(1 - beta1), by2 = (float)beta2, rest2 = (float)(1 - beta2);
  const Place place = place_of(all, tensor);
  double weights = 0, directions = 0;
  for (int i = threadIdx.x / 32; i < SPANS && place.first_span + i < place.num_spans; i += THREADS / 32) {
    Lane lane = lane_of(place, place.first_span + i);
    float w[8], g[8], m[8], v[8];
    read_weights(w, place, lane);
    read_grads(g, place, lane, grad_factor);
    read(m, place.first, lane);
    read(v, place.second, lane);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      m[j] += rest1 * (g[j] - m[j]);
      v[j] = v[j] * by2 + rest2 * g[j] * g[j];
      float r = direction_at(with, w[j], m[j], v[j]);
      if (j < lane.count) {
        weights += (double)w[j] * (double)w[j];
        directions += (double)r * (double)r;
      }
    }
    write(place.first, m, lane);
    write(place.second, v, lane);
  }
  for (int by = 16; by > 0; by /= 2) {
    weights += __shfl_xor_sync(0xffffffff, weights, by);
    directions += __shfl_xor_sync(0xffffffff, directions, by);
  }
  if (threadIdx.x % 32 == 0) {
    of_warps[0][threadIdx.x / 32] = weights;
    of_warps[1][threadIdx.x / 32] = directions;
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    double sum = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += of_warps[threadIdx.x][warp];
    sums[2 * blockIdx.x + threadIdx.x] = sum;
  }
}

// Adds up the sums of a tensor's blocks, in their order; one block of two threads for each tensor.
// The result of tensor i is in `squares[2 * index[i]]` and the next.
extern "C" __global__ void lamb_norms(const Tensors all, const float* found_inf, const double* sums, double* squares,
                                      long long num_blocks) {
  if (found_inf != nullptr && *found_inf != 0) return;
  int tensor = blockIdx.x;
  long long end = tensor + 1 < all.listed ? all.begin[tensor + 1] : num_blocks;
  double sum = 0;
  for (long long block = all.begin[tensor]; block < end; ++block) sum += sums[2 * block + threadIdx.x];
  squares[2 * (long long)all.random[tensor] + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) lamb_weights(
    const Tensors all, const double* lr_at, const float* found_inf, double lr, double beta1, double beta2, double eps,
    double weight_decay, int correction, double min_coeff, double max_coeff, const double* squares) {
  if (found_inf != nullptr && *found_inf != 0) return;
  int tensor = tensor_of(all);
  __shared__ Direction shared;
  __shared__ float shared_size;
  if (threadIdx.x == 0) {
    double step = (double)*all.step[tensor] + 1;
    shared = direction_of(step, beta1, beta2, eps, weight_decay, correction);
    if (lr_at != nullptr) lr = *lr_at;
    if (correction == 1) lr = lr * (sqrt(1 - pow(beta2, step)) / (1 - pow(beta1, step)));
    double weights = sqrt(squares[2 * all.random[tensor]]), direction = sqrt(squares[2 * all.random[tensor] + 1]);
    double coeff = weights / direction;
    // A NaN stays one.
    coeff = coeff < min_coeff ? min_coeff : coeff > max_coeff ? max_coeff : coeff;
    shared_size = (float)(lr * (weights == 0 || direction == 0 ? 1 : coeff));
  }
  __syncthreads();
  const Direction with = shared;
  const float step_size = shared_size;
  const Place place = place_of(all, tensor);
  for (int i = threadIdx.x / 32; i < SPANS; i += THREADS / 32) {
    long long span = place.first_span + i;
    if (span >= place.num_spans) return;
    Lane lane = lane_of(place, span);
    float w[8], m[8], v[8];
    read_weights(w, place, lane);
    read(m, place.first, lane);
    read(v, place.second, lane);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] -= step_size * direction_at(with, w[j], m[j], v[j]);
    write_weights(place, w, lane);
  }
}
#endif
