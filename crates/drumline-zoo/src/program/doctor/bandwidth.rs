//! How fast bytes move between the host's memory and a GPU's, within the GPU's, and from GPU to GPU.

use std::time::Instant;

use drumline::TorchError;
use drumline_torch::cuda;
use tch::{Device, Kind, Tensor};

use super::report::{Bandwidth, Between};

/// Enough that the start of a copy does not count.
const BYTES: i64 = 256 << 20;

/// Copies of each kind; the fastest counts.
pub(super) const ROUNDS: usize = 5;

/// All ways between the host and one GPU.
pub(super) fn measure(gpu: usize) -> Result<Vec<Bandwidth>, TorchError> {
    let bytes = |device| Tensor::f_zeros([BYTES], (Kind::Uint8, device));
    let (on_gpu, other, pageable) =
        (bytes(Device::Cuda(gpu))?, bytes(Device::Cuda(gpu))?, bytes(Device::Cpu)?);
    let pinned = cuda::pinned_like(&on_gpu)?;
    let ways = [
        ("host to GPU", "pinned", &on_gpu, &pinned),
        ("host to GPU", "pageable", &on_gpu, &pageable),
        ("GPU to host", "pinned", &pinned, &on_gpu),
        ("GPU to host", "pageable", &pageable, &on_gpu),
        ("within the GPU", "GPU", &other, &on_gpu),
    ];
    let way = |(way, memory, to, from): (&str, &str, &Tensor, &Tensor)| {
        let seconds = best_time(gpu, || cuda::copy_async(&mut to.shallow_clone(), from))?;
        Ok(Bandwidth { gpu, way: way.into(), memory: memory.into(), gb_per_s: BYTES as f64 / seconds / 1e9 })
    };
    ways.into_iter().map(way).collect()
}

/// From each of so many GPUs to each other.
pub(super) fn between(count: usize) -> Result<Vec<Between>, TorchError> {
    let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
    pairs.filter(|(from, to)| from != to).map(|(from, to)| one_way(from, to)).collect()
}

fn one_way(from: usize, to: usize) -> Result<Between, TorchError> {
    let bytes = |gpu| Tensor::f_zeros([BYTES], (Kind::Uint8, Device::Cuda(gpu)));
    let (source, mut target) = (bytes(from)?, bytes(to)?);
    cuda::synchronize(from)?;
    // libtorch copies on a stream of the source.
    let copied = || cuda::copy_async(&mut target, &source).and_then(|()| cuda::synchronize(from));
    let seconds = best_time(to, copied)?;
    Ok(Between { from, to, gb_per_s: BYTES as f64 / seconds / 1e9 })
}

/// Seconds of the fastest of some rounds, waited for.
pub(super) fn best_time(
    gpu: usize,
    mut body: impl FnMut() -> Result<(), TorchError>,
) -> Result<f64, TorchError> {
    let mut best = f64::MAX;
    cuda::synchronize(gpu)?;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        body()?;
        cuda::synchronize(gpu)?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(best)
}
