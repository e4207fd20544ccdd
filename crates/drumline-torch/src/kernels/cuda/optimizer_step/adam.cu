// AdamW and Adam, with means in 32, 16 or 8 bits.

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
