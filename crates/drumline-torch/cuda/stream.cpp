// Streams and events of CUDA.
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "status.h"

using c10::cuda::CUDAStream;
using drumline::guarded;
using drumline::Message;

namespace {

// The layout is that of `RawStream` in stream.rs: `c10::StreamData3`.
struct Stream {
  int64_t id;
  int32_t device;

  static Stream of(const CUDAStream& stream) {
    auto data = stream.pack3();
    return {data.stream_id, data.device_index};
  }

  CUDAStream cuda() const {
    return CUDAStream::unpack3(id, static_cast<c10::DeviceIndex>(device), c10::DeviceType::CUDA);
  }
};

}  // namespace

extern "C" {

Message drumline_cuda_stream_new(int32_t device, bool is_urgent, Stream* made) {
  return guarded([&] { *made = Stream::of(c10::cuda::getStreamFromPool(is_urgent, static_cast<c10::DeviceIndex>(device))); });
}

Message drumline_cuda_stream_current(int32_t device, Stream* found) {
  return guarded([&] { *found = Stream::of(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device))); });
}

// Makes it the current stream of its device for this thread.
Message drumline_cuda_stream_enter(Stream stream, Stream* before) {
  return guarded([&] {
    *before = Stream::of(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(stream.device)));
    c10::cuda::setCurrentCUDAStream(stream.cuda());
  });
}

Message drumline_cuda_stream_synchronize(Stream stream) {
  return guarded([&] { stream.cuda().synchronize(); });
}

Message drumline_cuda_stream_is_done(Stream stream, bool* done) {
  return guarded([&] { *done = stream.cuda().query(); });
}

// CUDA's id of the recording that the stream is part of; 0 if there is none.
Message drumline_cuda_stream_recording(Stream stream, uint64_t* id) {
  return guarded([&] {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long found = 0;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream.cuda().stream(), &status, &found));
    *id = status == cudaStreamCaptureStatusNone ? 0 : found;
  });
}

// The `cudaStream_t`.
Message drumline_cuda_stream_raw(Stream stream, void** raw) {
  return guarded([&] { *raw = stream.cuda().stream(); });
}

Message drumline_cuda_event_new(bool is_timed, c10::cuda::CUDAEvent** made) {
  return guarded([&] { *made = new c10::cuda::CUDAEvent(is_timed ? cudaEventDefault : cudaEventDisableTiming); });
}

void drumline_cuda_event_free(c10::cuda::CUDAEvent* event) { delete event; }

Message drumline_cuda_event_record(c10::cuda::CUDAEvent* event, Stream stream) {
  return guarded([&] { event->record(stream.cuda()); });
}

Message drumline_cuda_event_block(c10::cuda::CUDAEvent* event, Stream stream) {
  return guarded([&] { event->block(stream.cuda()); });
}

Message drumline_cuda_event_is_done(c10::cuda::CUDAEvent* event, bool* done) {
  return guarded([&] { *done = event->query(); });
}

Message drumline_cuda_event_synchronize(c10::cuda::CUDAEvent* event) {
  return guarded([&] { event->synchronize(); });
}

Message drumline_cuda_event_milliseconds(c10::cuda::CUDAEvent* from, c10::cuda::CUDAEvent* to, float* milliseconds) {
  return guarded([&] { *milliseconds = from->elapsed_time(*to); });
}

}  // extern "C"
