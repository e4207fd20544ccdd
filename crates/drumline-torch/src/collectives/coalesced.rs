//! Lists of tensors in few calls: tensors of one type are sent together, up to a size limit.

use drumline_comm::DType;
use tch::Tensor;

use super::host::{Host, overlap};
use crate::error::TorchError;

/// Larger calls are not faster.
const MOST_BYTES: usize = 64 << 20;

/// Tensors that are sent in one call.
pub(super) type Batch = Vec<Host>;

/// The tensors of a list, for writing, in batches of one type. Ranks that pass the same list get the same batches.
pub(super) fn batches(tensors: &[Tensor]) -> Result<Vec<Batch>, TorchError> {
    let mut batches: Vec<Batch> = Vec::new();
    for tensor in tensors {
        let mut host = Host::write(tensor)?;
        let batch = batches.iter().rposition(|batch| dtype_of(batch) == host.carried.dtype);
        let bytes = |batch: &Batch| batch.iter().map(|host| host.span().len()).sum::<usize>();
        match batch.map(|at| &mut batches[at]) {
            Some(batch) if bytes(batch) + host.span().len() <= MOST_BYTES => {
                if batch.iter().any(|other| overlap(&other.span(), &host.span())) {
                    host.stage()?;
                }
                batch.push(host);
            }
            _ => batches.push(vec![host]),
        }
    }
    Ok(batches)
}

/// The type of a batch.
pub(super) fn dtype_of(batch: &Batch) -> DType {
    // Every batch has at least one tensor.
    batch[0].carried.dtype
}
