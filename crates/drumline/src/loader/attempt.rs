//! Making a batch with a net below: a panic in the data set becomes an error that names the sample.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Dataset, LoaderError, Sample, SampleError};

/// The batch, or why there is none; `None` if it was stopped.
pub(super) fn batch<D: Dataset>(
    dataset: &D,
    samples: &[Sample],
    stop: &AtomicBool,
) -> Result<Option<D::Batch>, LoaderError> {
    // A data set is shared by threads: one that a panic leaves broken says so itself, as a poisoned lock does.
    match catch_unwind(AssertUnwindSafe(|| make(dataset, samples, stop))) {
        Ok(made) => Ok(made?),
        Err(panic) => Err(blame(dataset, samples, &words(&*panic))),
    }
}

/// The batch in pinned memory.
pub(super) fn pin<D: Dataset>(
    dataset: &D,
    batch: D::Batch,
    samples: &[Sample],
) -> Result<D::Batch, LoaderError> {
    let first = samples.first().map_or(0, |sample| sample.index);
    match catch_unwind(AssertUnwindSafe(|| dataset.pin_memory(batch))) {
        Ok(pinned) => pinned.map_err(LoaderError::Pin),
        Err(panic) => {
            Err(LoaderError::BatchPanicked { count: samples.len(), first, message: words(&*panic) })
        }
    }
}

fn make<D: Dataset>(
    dataset: &D,
    samples: &[Sample],
    stop: &AtomicBool,
) -> Result<Option<D::Batch>, SampleError> {
    match dataset.batch_unless_stopped(samples, stop)? {
        // It gave up unasked; the caller would wait for this batch for ever.
        None if !stop.load(Ordering::Relaxed) => dataset.batch(samples).map(Some),
        made => Ok(made),
    }
}

/// Which sample it was: the first that panics by itself. Samples are made from their seeds alone, so it does so again.
fn blame<D: Dataset>(dataset: &D, samples: &[Sample], message: &str) -> LoaderError {
    for sample in samples {
        let alone = catch_unwind(AssertUnwindSafe(|| dataset.batch(std::slice::from_ref(sample)).is_ok()));
        if let Err(panic) = alone {
            let name = catch_unwind(AssertUnwindSafe(|| dataset.name(sample.index)));
            let name = name.unwrap_or_else(|_| "its name cannot be told".to_owned());
            return LoaderError::Panicked { index: sample.index, name, message: words(&*panic) };
        }
    }
    let first = samples.first().map_or(0, |sample| sample.index);
    LoaderError::BatchPanicked { count: samples.len(), first, message: message.to_owned() }
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
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
