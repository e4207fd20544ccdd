//! Makes a batch. A panic in the data set becomes an error that names the sample.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use drumline_comm::panic_text;

use super::{Dataset, LoaderError, Sample, SampleError};

/// Makes a batch; `None` if it was stopped.
pub(super) fn batch<D: Dataset>(
    dataset: &D,
    samples: &[Sample],
    stop: &AtomicBool,
) -> Result<Option<D::Batch>, LoaderError> {
    // A data set is shared by threads. One that a panic leaves broken reports that itself, as a poisoned lock does.
    match catch_unwind(AssertUnwindSafe(|| make(dataset, samples, stop))) {
        Ok(made) => Ok(made?),
        Err(panic) => Err(blame(dataset, samples, panic_text(&*panic))),
    }
}

/// Copies the batch to pinned memory.
pub(super) fn pin<D: Dataset>(
    dataset: &D,
    batch: D::Batch,
    samples: &[Sample],
) -> Result<D::Batch, LoaderError> {
    let first = samples.first().map_or(0, |sample| sample.index);
    match catch_unwind(AssertUnwindSafe(|| dataset.pin_memory(batch))) {
        Ok(pinned) => pinned.map_err(LoaderError::Pin),
        Err(panic) => Err(LoaderError::BatchPanicked {
            count: samples.len(),
            first,
            message: panic_text(&*panic).to_owned(),
        }),
    }
}

fn make<D: Dataset>(
    dataset: &D,
    samples: &[Sample],
    stop: &AtomicBool,
) -> Result<Option<D::Batch>, SampleError> {
    match dataset.batch_unless_stopped(samples, stop)? {
        // It gave up without being asked. The caller would wait for this batch forever.
        None if !stop.load(Ordering::Relaxed) => dataset.batch(samples).map(Some),
        made => Ok(made),
    }
}

/// Finds the sample that panicked: the first that panics by itself. Samples are made from their seeds alone, so it
/// panics again.
fn blame<D: Dataset>(dataset: &D, samples: &[Sample], message: &str) -> LoaderError {
    for sample in samples {
        let alone = catch_unwind(AssertUnwindSafe(|| dataset.batch(std::slice::from_ref(sample)).is_ok()));
        if let Err(panic) = alone {
            let name = catch_unwind(AssertUnwindSafe(|| dataset.name(sample.index)));
            let name = name.unwrap_or_else(|_| "its name is not known".to_owned());
            return LoaderError::Panicked {
                index: sample.index,
                name,
                message: panic_text(&*panic).to_owned(),
            };
        }
    }
    let first = samples.first().map_or(0, |sample| sample.index);
    LoaderError::BatchPanicked { count: samples.len(), first, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_torch::TorchError;

    /// A data set whose batches cannot be pinned.
    struct Unpinnable;

    impl Dataset for Unpinnable {
        type Batch = usize;

        fn len(&self) -> usize {
            4
        }

        fn batch(&self, samples: &[Sample]) -> Result<usize, SampleError> {
            Ok(samples.len())
        }

        fn pin_memory(&self, _: usize) -> Result<usize, TorchError> {
            panic!("no such memory")
        }
    }

    #[test]
    fn a_panic_while_pinning_is_an_error() {
        let samples = [Sample::new(0, 0, 2), Sample::new(0, 0, 3)];
        let Some(made) = batch(&Unpinnable, &samples, &AtomicBool::new(false)).unwrap() else { panic!() };
        let error = pin(&Unpinnable, made, &samples).unwrap_err().to_string();
        assert!(error.contains("no such memory"), "{error}");
    }
}
