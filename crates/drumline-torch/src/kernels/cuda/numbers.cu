// The beginning of all kernel sources. ELEMENT, the element type, is defined when they are compiled.

#define INFINITY __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

typedef unsigned char u8;
typedef unsigned short u16;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline float to_float(float x) { return x; }
__device__ inline void from_float(bf16& to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ inline void from_float(f16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ inline void from_float(float& to, float x) { to = x; }

typedef ELEMENT T;

// The vector that a thread reads or writes at once: 16 bytes.
const int N = 16 / sizeof(T);
struct alignas(16) Vec { T at[N]; };
// A byte for each element of a vector.
struct alignas(N) Bytes { u8 at[N]; };
