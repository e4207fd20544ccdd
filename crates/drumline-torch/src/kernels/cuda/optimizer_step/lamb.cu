// LAMB, in three kernels: the means, with sums of blocks; the sums of tensors; the weights. The sums of a tensor are where
// its key says: `random` has no other use here.

#if MEANS == 0
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
