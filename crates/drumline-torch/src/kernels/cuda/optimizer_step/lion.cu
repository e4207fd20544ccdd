// Lion.

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
#endif
