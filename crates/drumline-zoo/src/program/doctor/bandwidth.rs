//! Measures bandwidths: between host memory and a GPU, within a GPU, and between GPUs. Copies between GPUs are also
//! checked for changed bytes.

use std::time::Instant;

use drumline::torch::TorchError;
use drumline_torch::cuda;
use tch::{Device, Kind, Tensor};

use super::report::{Bandwidth, Between};

/// Large enough that the latency of a copy does not matter.
const BYTES: i64 = 256 << 20;

/// The number of copies of each kind; the fastest counts.
pub(super) const ROUNDS: usize = 5;

/// Measures both directions between the host and one GPU, and copies within the GPU.
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

/// Measures copies between all pairs of `count` GPUs.
pub(super) fn between(count: usize) -> Result<Vec<Between>, TorchError> {
    let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
    pairs.filter(|(from, to)| from != to).map(|(from, to)| one_way(from, to)).collect()
}

fn one_way(from: usize, to: usize) -> Result<Between, TorchError> {
    let (source, expected) = (pattern(BYTES, Device::Cuda(from))?, pattern(BYTES, Device::Cuda(to))?);
    let mut target = Tensor::f_zeros([BYTES], (Kind::Uint8, Device::Cuda(to)))?;
    cuda::synchronize(from)?;
    // libtorch copies on a stream of the source GPU.
    let copied = || cuda::copy_async(&mut target, &source).and_then(|()| cuda::synchronize(from));
    let seconds = best_time(to, copied)?;
    let wrong_bytes = wrong_bytes(&target, &expected)?;
    Ok(Between { from, to, gb_per_s: BYTES as f64 / seconds / 1e9, wrong_bytes })
}

/// A pattern of bytes that differ from position to position and from one MiB to the next, computed on the device.
fn pattern(bytes: i64, device: Device) -> Result<Tensor, TorchError> {
    const BLOCK: i64 = 1 << 20;
    let numbers = |len| Tensor::f_arange(len, (Kind::Int, device));
    let within = numbers(BLOCK)?.f_remainder(251)?.f_unsqueeze(0)?;
    let blocks = numbers(bytes / BLOCK)?.f_mul_scalar(7)?.f_unsqueeze(1)?;
    let blocks = blocks.f_remainder(251)?.f_to_kind(Kind::Uint8)?;
    // Computed in bytes with overflow: 32-bit numbers would take 1 GiB.
    Ok(within.f_to_kind(Kind::Uint8)?.f_add(&blocks)?.f_flatten(0, -1)?)
}

/// The number of bytes that differ, counted on the device.
fn wrong_bytes(got: &Tensor, expected: &Tensor) -> Result<u64, TorchError> {
    Ok(got.f_ne_tensor(expected)?.f_sum(Kind::Int64)?.f_int64_value(&[])? as u64)
}

/// Seconds of the fastest of several rounds, including synchronisation.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_any_byte_is_detected() {
        let expected = pattern(4 << 20, Device::Cpu).unwrap();
        assert_eq!((expected.size(), expected.kind()), (vec![4 << 20], Kind::Uint8));
        let got = expected.copy();
        assert_eq!(wrong_bytes(&got, &expected).unwrap(), 0);
        for place in [0, 1 << 20, (4 << 20) - 1] {
            let _ = got.narrow(0, place, 1).f_add_scalar_(1).unwrap();
        }
        assert_eq!(wrong_bytes(&got, &expected).unwrap(), 3);
        // Swapped blocks and zeros are detected too.
        let moved = Tensor::cat(&[expected.narrow(0, 1 << 20, 1 << 20), expected.narrow(0, 0, 1 << 20)], 0);
        assert!(wrong_bytes(&moved, &expected.narrow(0, 0, 2 << 20)).unwrap() > 1 << 20);
        assert!(wrong_bytes(&expected.zeros_like(), &expected).unwrap() > 4 * 1_000_000);
    }
}
