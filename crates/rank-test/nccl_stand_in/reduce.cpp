// Reductions of the stand-in, element by element: floats in double precision, rounded once.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "exchange.h"

namespace stand_in {

namespace {

enum Op { kSum, kProd, kMax, kMin, kAvg, kScaledSum };

// The upper half of a float; rounded to the nearest, ties to even.
struct Bf16 {
  uint16_t bits;

  Bf16(double value) {
    float single = static_cast<float>(value);
    uint32_t all;
    std::memcpy(&all, &single, sizeof all);
    bits = static_cast<uint16_t>((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }

  operator double() const {
    uint32_t all = static_cast<uint32_t>(bits) << 16;
    float single;
    std::memcpy(&single, &all, sizeof single);
    return single;
  }
};

template <typename Wide>
Wide of_two(Wide a, Wide b, int op) {
  switch (op) {
    case kProd: return a * b;
    case kMax: return std::max(a, b);
    case kMin: return std::min(a, b);
    default: return a + b;
  }
}

template <typename T>
void reduce_as(char* parts, int num_parts, const Reduction& how) {
  using Wide = std::conditional_t<std::is_integral_v<T>, T, double>;
  T* all = reinterpret_cast<T*>(parts);
  for (size_t i = 0; i < how.count; ++i) {
    auto part = [&](int k) {
      Wide value = static_cast<Wide>(all[k * how.count + i]);
      return how.op == kScaledSum ? static_cast<Wide>(value * how.factor) : value;
    };
    Wide value = part(0);
    for (int k = 1; k < num_parts; ++k) value = of_two<Wide>(value, part(k), how.op);
    if (how.op == kAvg) value = static_cast<Wide>(value / num_parts);
    all[i] = static_cast<T>(value);
  }
}

template <typename T>
double value_as(const void* element) {
  return static_cast<double>(*static_cast<const T*>(element));
}

struct Kind {
  size_t bytes;
  double (*value)(const void*);
  void (*reduce)(char*, int, const Reduction&);
};

template <typename T>
constexpr Kind kKind = {sizeof(T), value_as<T>, reduce_as<T>};

// By `ncclDataType_t`.
constexpr Kind kKinds[] = {kKind<int8_t>,   kKind<uint8_t>,  kKind<int32_t>, kKind<uint32_t>, kKind<int64_t>,
                           kKind<uint64_t>, kKind<_Float16>, kKind<float>,   kKind<double>,   kKind<Bf16>};

}  // namespace

size_t element_bytes(int dtype) { return kKinds[dtype].bytes; }

double element_value(const void* element, int dtype) { return kKinds[dtype].value(element); }

void reduce(char* parts, int num_parts, const Reduction& how) { kKinds[how.dtype].reduce(parts, num_parts, how); }

}  // namespace stand_in
