//! A data set of two functions: one makes a sample, the other makes a batch of samples.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Dataset, Sample, SampleError};

/// Any error, as functions of users return it.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

type Naming = Box<dyn Fn(usize) -> String + Send + Sync>;

/// A data set of two functions: one makes a sample, the other collates samples to a batch.
///
/// ```
/// use drumline::data::{Cause, Dataset, MapDataset, Sample};
///
/// // Words, upper case, joined to a batch.
/// let words = vec!["one", "two", "three"];
/// let upper = |word: &&str, _: Sample| Ok(word.to_uppercase());
/// let dataset = MapDataset::of_vec(words, upper, |batch| Ok::<_, Cause>(batch.join(" ")));
/// let samples = [Sample::new(0, 0, 2), Sample::new(0, 0, 0)];
/// assert_eq!(dataset.batch(&samples)?, "THREE ONE");
/// # Ok::<(), drumline::data::SampleError>(())
/// ```
pub struct MapDataset<F, C> {
    len: usize,
    load: F,
    collate: C,
    naming: Option<Naming>,
}

impl<T, B, F, C> MapDataset<F, C>
where
    F: Fn(Sample) -> Result<T, Cause> + Send + Sync,
    C: Fn(Vec<T>) -> Result<B, Cause> + Send + Sync,
{
    /// A data set of `len` samples. `load` makes a sample, `collate` makes a batch of samples.
    pub fn new(len: usize, load: F, collate: C) -> Self {
        Self { len, load, collate, naming: None }
    }

    /// Sets the names of the samples for people.
    #[must_use]
    pub fn with_names(self, name: impl Fn(usize) -> String + Send + Sync + 'static) -> Self {
        Self { naming: Some(Box::new(name)), ..self }
    }
}

impl<C> MapDataset<(), C> {
    /// A data set with a sample for each item. `load` makes it from the item, `collate` makes a batch of samples.
    pub fn of_vec<I, T, B>(
        items: Vec<I>,
        load: impl Fn(&I, Sample) -> Result<T, Cause> + Send + Sync,
        collate: C,
    ) -> MapDataset<impl Fn(Sample) -> Result<T, Cause> + Send + Sync, C>
    where
        I: Send + Sync,
        C: Fn(Vec<T>) -> Result<B, Cause> + Send + Sync,
    {
        MapDataset::new(items.len(), move |sample: Sample| load(&items[sample.index], sample), collate)
    }
}

impl<T, B, F, C> Dataset for MapDataset<F, C>
where
    B: Send,
    F: Fn(Sample) -> Result<T, Cause> + Send + Sync,
    C: Fn(Vec<T>) -> Result<B, Cause> + Send + Sync,
{
    type Batch = B;

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, samples: &[Sample]) -> Result<B, SampleError> {
        let never = AtomicBool::new(false);
        Ok(self.batch_unless_stopped(samples, &never)?.expect("nobody stops it"))
    }

    fn batch_unless_stopped(&self, samples: &[Sample], stop: &AtomicBool) -> Result<Option<B>, SampleError> {
        let mut items = Vec::with_capacity(samples.len());
        for sample in samples {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let item = (self.load)(*sample);
            items.push(item.map_err(|cause| SampleError::new(sample.index, self.name(sample.index), cause))?);
        }
        (self.collate)(items).map(Some).map_err(|cause| {
            let (first, count) = (samples.first().map_or(0, |sample| sample.index), samples.len());
            SampleError::new(first, format!("first of a batch of {count} that cannot be collated"), cause)
        })
    }

    fn name(&self, index: usize) -> String {
        self.naming.as_ref().map_or_else(|| format!("#{index}"), |name| name(index))
    }
}

impl<F, C> std::fmt::Debug for MapDataset<F, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapDataset").field("len", &self.len).finish_non_exhaustive()
    }
}
