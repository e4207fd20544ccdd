//! An all-reduce over all ranks, each on its own GPU: checked and timed.

use drumline::comm::TensorCollectives;
use drumline::torch::TorchError;
use drumline::{ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use super::bandwidth;
use super::report::AllReduce;

const BYTES: i64 = 64 << 20;

/// Runs the all-reduce. Rank `i` contributes the value `i + 1`. All ranks must call it.
pub(super) fn all_reduce(group: &ProcessGroup, gpu: usize) -> anyhow::Result<AllReduce> {
    let (rank, ranks) = (group.rank(), group.size());
    let made = Tensor::f_full([BYTES / 4], rank as f64 + 1.0, (Kind::Float, Device::Cuda(gpu)));
    // Ranks agree on the allocation first, so that none waits for a rank that is out of memory.
    let mut x = drumline::comm::agree_on(group, made.map_err(anyhow::Error::from))?;
    let seconds = drumline::comm::agree_on(group, checked(group, &mut x, gpu).map_err(anyhow::Error::from))?;
    Ok(AllReduce::new(
        ranks,
        BYTES as u64,
        seconds,
        group.is_recordable().err().map(|reason| reason.to_string()),
    ))
}

/// Checks the sum and returns the seconds of the fastest round.
fn checked(group: &ProcessGroup, x: &mut Tensor, gpu: usize) -> Result<f64, TorchError> {
    group.all_reduce_tensor(x, ReduceOp::Sum)?;
    // The timed rounds take the maximum of equal values, which has the same cost and leaves the sum unchanged.
    let seconds = bandwidth::best_time(gpu, || group.all_reduce_tensor(x, ReduceOp::Max))?;
    let ranks = group.size() as f64;
    let expected = ranks * (ranks + 1.0) / 2.0;
    let [least, most] = [x.f_min()?.f_double_value(&[])?, x.f_max()?.f_double_value(&[])?];
    if [least, most] == [expected; 2] {
        return Ok(seconds);
    }
    let what = format!("the all-reduce of {ranks} ranks on GPU {gpu}");
    Err(TorchError::value(what, format!("{least} to {most}"), expected.to_string()))
}
