// The cross-entropy of rows of logits. Forward reads them once and writes each row's loss and the logarithm of its sum
// of exponentials; backward overwrites them with their gradient. Columns from `valid` on are ignored.

const int THREADS = 512;
const int AT_ONCE = 4;

// The maximum so far, and the sum of exp(x - maximum).
struct Sum { float max, sum; };

__device__ inline Sum join(Sum a, Sum b) {
  float max = fmaxf(a.max, b.max);
  // At the beginning the maximum is minus infinity, and the sum is zero.
  if (max == -INFINITY) return a;
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

__device__ Sum joined(Sum own) {
  __shared__ Sum of_warps[THREADS / 32];
#pragma unroll
  for (int mask = 16; mask; mask /= 2) own = join(own, {__shfl_xor_sync(~0u, own.max, mask), __shfl_xor_sync(~0u, own.sum, mask)});
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  Sum all = of_warps[0];
  for (int warp = 1; warp < THREADS / 32; ++warp) all = join(all, of_warps[warp]);
  return all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    row_losses(const T* __restrict__ logits, const long long* __restrict__ classes, float* losses, float* logs, int count, int valid) {
  const T* row = logits + (size_t)blockIdx.x * count;
  Sum own = {-INFINITY, 0.f};
  int vectors = count / N;
  for (int first = threadIdx.x; first < vectors; first += AT_ONCE * THREADS) {
    Vec v[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (first + u * THREADS < vectors) v[u] = ((const Vec*)row)[first + u * THREADS];
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      int column = (first + u * THREADS) * N;
      if (column >= valid) break;
      float max = own.max, values[N];
      for (int i = 0; i < N; ++i) {
        values[i] = column + i < valid ? to_float(v[u].at[i]) : -INFINITY;
        max = fmaxf(max, values[i]);
      }
      if (max == -INFINITY) continue;
      float sum = own.sum * __expf(own.max - max);
      for (int i = 0; i < N; ++i) sum += __expf(values[i] - max);
      own = {max, sum};
    }
  }
  Sum all = joined(own);
  if (threadIdx.x == 0) {
    long long right = classes[blockIdx.x];
    float log = all.max + logf(all.sum);
    logs[blockIdx.x] = log;
    // A target class out of range makes the loss NaN.
    losses[blockIdx.x] = right >= 0 && right < valid ? log - to_float(row[right]) : NOT_A_NUMBER;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    row_gradients(T* logits, const long long* __restrict__ classes, const float* __restrict__ logs, const float* by_sum, int count, int valid) {
  Vec* row = (Vec*)(logits + (size_t)blockIdx.x * count);
  float log = logs[blockIdx.x], by = *by_sum;
  int vectors = count / N;
  long long right = classes[blockIdx.x];
  if (right < 0 || right >= valid) by = NOT_A_NUMBER;
  for (int first = threadIdx.x; first < vectors; first += AT_ONCE * THREADS) {
    Vec v[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (first + u * THREADS < vectors) v[u] = row[first + u * THREADS];
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (first + u * THREADS >= vectors) break;
      int column = (first + u * THREADS) * N;
      for (int i = 0; i < N; ++i) {
        float share = column + i < valid ? __expf(to_float(v[u].at[i]) - log) - (column + i == right ? 1.f : 0.f) : 0.f;
        from_float(v[u].at[i], share * by);
      }
      row[first + u * THREADS] = v[u];
    }
  }
}
