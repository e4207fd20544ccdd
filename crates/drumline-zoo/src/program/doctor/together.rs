//! An all-reduce of all ranks, each on its own GPU: checked, and timed.

use drumline::{ProcessGroup, ReduceOp, TensorCollectives, TorchError};
use tch::{Device, Kind, Tensor};

use super::bandwidth;
use super::report::AllReduce;

const BYTES: i64 = 64 << 20;

/// Rank `i` gives `i + 1` throughout; all ranks call.
pub(super) fn all_reduce(group: &ProcessGroup, gpu: usize) -> anyhow::Result<AllReduce> {
    let (rank, ranks) = (group.rank(), group.size());
    let made = Tensor::f_full([BYTES / 4], rank as f64 + 1.0, (Kind::Float, Device::Cuda(gpu)));
    // One without memory says so before the others wait for it.
    let mut x = drumline::agree_on(group, made.map_err(anyhow::Error::from))?;
    let seconds = drumline::agree_on(group, checked(group, &mut x, gpu).map_err(anyhow::Error::from))?;
    Ok(AllReduce::new(ranks, BYTES as u64, seconds, group.is_recordable().err()))
}

/// Seconds of the fastest.
fn checked(group: &ProcessGroup, x: &mut Tensor, gpu: usize) -> Result<f64, TorchError> {
    group.all_reduce_tensor(x, ReduceOp::Sum)?;
    // The largest of equal numbers is that number: as much to do, and the sum is still there to be checked.
    let seconds = bandwidth::best_time(gpu, || group.all_reduce_tensor(x, ReduceOp::Max))?;
    let ranks = group.size() as f64;
    let expected = ranks * (ranks + 1.0) / 2.0;
    let [least, most] = [x.f_min()?.f_double_value(&[])?, x.f_max()?.f_double_value(&[])?];
    match [least, most] == [expected; 2] {
        true => Ok(seconds),
        false => Err(TorchError::Unfit(format!(
            "the all-reduce of {ranks} ranks gave {least} to {most} on GPU {gpu}, expected {expected}"
        ))),
    }
}
