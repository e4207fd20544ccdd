//! How much memory is in use, and the error when there is none left.

use drumline_torch::TorchError;
use drumline_torch::cuda::{empty_cache, memory, reset_peak};
use tch::Tensor;

use super::shared::{FLOAT, gpu};

const MIB: i64 = 1 << 20;

#[test]
fn tensors_are_counted_and_peaks_are_kept() {
    let _turn = gpu();
    empty_cache().unwrap();
    reset_peak(0).unwrap();
    let before = memory(0).unwrap();
    let tensor = Tensor::zeros([64 * MIB], FLOAT);
    let with = memory(0).unwrap();
    assert_eq!(with.allocated - before.allocated, 256 << 20);
    drop(tensor);
    let after = memory(0).unwrap();
    assert_eq!(after.allocated, before.allocated);
    assert!(after.peak_allocated >= with.allocated && after.reserved >= after.allocated);
    reset_peak(0).unwrap();
    assert_eq!(memory(0).unwrap().peak_allocated, before.allocated);
    empty_cache().unwrap();
    assert!(memory(0).unwrap().reserved < with.reserved);
    assert!(after.free < after.total);
}

#[test]
fn out_of_memory_has_a_breakdown_and_training_can_continue() {
    let _turn = gpu();
    let _held = Tensor::zeros([256 * MIB], FLOAT);
    let total = i64::try_from(memory(0).unwrap().total).unwrap();
    let error = TorchError::from(Tensor::f_zeros([total / 4], FLOAT).unwrap_err());
    let text = error.to_string();
    assert!(matches!(error, TorchError::OutOfMemory(_)), "{text}");
    for part in ["GPU 0 (NVIDIA", "is out of memory", "tensors have 1.", "are free", "try a smaller batch"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    println!("{text}");
    assert_eq!(Tensor::ones([4], FLOAT).sum(tch::Kind::Float).double_value(&[]), 4.0);
}
