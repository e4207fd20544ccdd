//! Follows the gradients of a backward from autograd to their reduction, for any way to store and reduce them.
//!
//! ```text
//!   autograd ─hook─▶ Places::store ─▶ Progress: bucket full, its turn ─▶ Places::send ─▶ Lane
//!   end of backward: a missing gradient is zero; if it is missing on all ranks, it stays undefined
//! ```
//! Buckets are sent in the order in which rank 0's gradients became ready in the first step.

use std::sync::Arc;

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::cuda::Stream;
use drumline_torch::{FunctionError, Named};

use crate::error::{NotRecordable, ParallelError};
use crate::lane::Lane;
use crate::progress::Progress;
use crate::reduction::{Reduction, Site};

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Where gradients are stored until they are reduced. Gradients that are reduced together are a bucket.
pub(crate) trait Places: Send {
    /// The jobs of the lane that reduces them.
    type Job: Send + 'static;

    /// The parameters.
    fn params(&self) -> &[Named];

    /// For each parameter its bucket; buckets are counted in the order in which they are reduced.
    fn bucket_of(&self) -> &[usize];

    /// Begins a backward.
    fn begin(&mut self) -> Result;

    /// A gradient was accumulated: stores it, if that is not left to [`send`](Self::send).
    fn store(&mut self, param: usize, lane: &mut Lane<Self::Job>) -> Result;

    /// Stores the gradient of an earlier backward, or zeros. Returns whether there was a gradient.
    fn store_missing(&mut self, param: usize, lane: &mut Lane<Self::Job>) -> Result<bool>;

    /// Sends the reduction of a bucket, of which all gradients are there.
    fn send(&mut self, bucket: usize, site: Site, lane: &mut Lane<Self::Job>) -> Result;

    /// The job that finds out which parameters any rank has used.
    fn flags(&self, used: Vec<u8>) -> Self::Job;

    /// All gradients are reduced. Leaves parameters that no rank has used without a gradient.
    fn settle(&mut self, used: &[u8], used_anywhere: &[u8]) -> Result;

    /// From now on gradients become ready in this order. Called between backwards.
    fn reorder(&mut self, order: &[usize]) -> Result;

    /// The size of each bucket in bytes.
    fn bytes(&self) -> Vec<usize>;

    /// Ends the groups of reductions: this rank will not continue.
    fn abort(&self, cause: &str);

    /// The current stream of this thread, for gradients on a GPU.
    fn stream(&self) -> Result<Option<Stream>>;

    /// An error that says why, if these reductions cannot be recorded in a CUDA graph.
    fn is_recordable(&self, order: OrderKnown) -> std::result::Result<(), NotRecordable>;
}

/// Whether the first steps have shown in which order gradients become ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OrderKnown {
    Yes,
    NotYet,
}

/// The mode of a backward.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    /// It was not called through an engine: an error, because ranks would silently diverge.
    Unexpected,
    /// It is inside `no_sync`: gradients stay where autograd puts them.
    Unreduced,
    Reducing,
}

/// The state of the order of buckets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// The reverse order of creation.
    Guessed,
    /// The first step has shown the real order, and all ranks know rank 0's.
    Agreed,
    /// The buckets use it.
    InUse,
}

/// Reduces the gradients of backwards.
pub(crate) struct Reducer<P: Places> {
    group: Arc<ProcessGroup>,
    places: P,
    order: Vec<usize>,
    stage: Order,
    progress: Progress,
    mode: Mode,
    /// Where the program called the current backward.
    site: Site,
    lane: Lane<P::Job>,
    /// Parameters without a gradient in the last step; logged when it changes.
    unused: Vec<usize>,
    /// The error with which a hook has ended the current backward: libtorch passes on only its text.
    refusal: Option<ParallelError>,
}

/// Gradients become ready roughly in the reverse order of creation.
pub(crate) fn guessed_order(num_params: usize) -> Vec<usize> {
    (0..num_params).rev().collect()
}

impl<P: Places> Reducer<P> {
    /// `places` has the [`guessed_order`].
    #[track_caller]
    pub(crate) fn new(group: Arc<ProcessGroup>, places: P, lane: Lane<P::Job>) -> Self {
        Self {
            group,
            order: guessed_order(places.params().len()),
            places,
            stage: Order::Guessed,
            progress: Progress::default(),
            mode: Mode::Unexpected,
            site: call_site(),
            lane,
            unused: Vec::new(),
            refusal: None,
        }
    }

    fn arrived(&mut self, param: usize) -> Result {
        match self.mode {
            Mode::Reducing => {}
            Mode::Unreduced => return Ok(()),
            Mode::Unexpected => {
                return Err(ParallelError::BackwardOutsideDdp { rank: self.group.rank() });
            }
        }
        if self.progress.is_ready(param) {
            return Err(self.ready_twice(param));
        }
        self.places.store(param, &mut self.lane)?;
        self.send_ready(param)
    }

    fn send_ready(&mut self, param: usize) -> Result {
        let buckets = self.progress.ready(param, self.places.bucket_of());
        for bucket in buckets.ok_or_else(|| self.ready_twice(param))? {
            self.places.send(bucket, self.site, &mut self.lane)?;
        }
        Ok(())
    }

    /// The bucket may have been reduced with only the first part of the gradient.
    fn ready_twice(&self, param: usize) -> ParallelError {
        let name = self.places.params()[param].name.clone();
        ParallelError::MarkedReadyTwice { rank: self.group.rank(), name }
    }

    /// Sends the buckets that this backward did not complete. Returns which parameters have a gradient on this rank.
    fn send_rest(&mut self) -> Result<Vec<u8>> {
        let mut used = vec![1u8; self.places.params().len()];
        // In the order of buckets, because the places of some may be used again for later ones.
        for param in self.order.clone() {
            // A parameter that this backward did not reach may have an earlier gradient; otherwise its gradient is
            // zero.
            if !self.progress.is_ready(param) {
                used[param] = u8::from(self.places.store_missing(param, &mut self.lane)?);
                self.send_ready(param)?;
            }
        }
        let flags = self.places.flags(used.clone());
        self.lane.send(self.site, flags);
        Ok(used)
    }

    /// Sends the rest on another thread, because sending may wait for reductions that other ranks begin only after what
    /// this thread does meanwhile.
    fn send_rest_beside(&mut self, meanwhile: &mut dyn FnMut() -> Result) -> Result<Vec<u8>> {
        let (group, stream) = (self.group.clone(), self.places.stream()?);
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let _on_stream = stream.map(Stream::enter).transpose()?;
                self.send_rest()
            });
            let met = meanwhile();
            if let Err(error) = &met {
                // What is sent waits for ranks that will not come.
                group.abort(&error.to_string());
            }
            let sent =
                sending.join().unwrap_or(Err(ParallelError::Internal { what: "sending gradients panicked" }));
            met.and(sent)
        })
    }

    fn log_unused(&mut self, used: &[u8]) {
        let unused: Vec<usize> = (0..used.len()).filter(|param| used[*param] == 0).collect();
        if unused == self.unused {
            return;
        }
        let params = self.places.params();
        let names: Vec<&str> = unused.iter().map(|param| params[*param].name.as_str()).collect();
        let rank = self.group.rank();
        tracing::debug!(rank, count = names.len(), ?names, "parameters that this rank's loss does not use");
        self.unused = unused;
    }

    /// From the next step on all ranks reduce in the order in which rank 0's gradients became ready. Ranks agree on it
    /// here, at the end of backward, where all are at the same point: before a step a rank may have to join another's
    /// forward first.
    fn agree_on_order(&mut self, arrived: &[usize]) -> Result {
        let mut order: Vec<u64> = arrived.iter().map(|param| *param as u64).collect();
        on_behalf_of(self.site, || self.group.broadcast(&mut order, 0))?;
        self.order = order.into_iter().map(|param| param as usize).collect();
        self.stage = Order::Agreed;
        Ok(())
    }

    fn use_order(&mut self) -> Result {
        self.places.reorder(&self.order)?;
        self.stage = Order::InUse;
        let megabytes: Vec<_> = self.places.bytes().iter().map(|bytes| *bytes as f64 / 1e6).collect();
        tracing::debug!(rank = self.group.rank(), ?megabytes, "buckets in the order of the first step");
        Ok(())
    }
}

impl<P: Places> Reduction for Reducer<P> {
    fn allow_unreduced(&mut self, allowed: bool) {
        self.mode = if allowed { Mode::Unreduced } else { Mode::Unexpected };
    }

    fn begin(&mut self, site: Site) -> Result {
        self.site = site;
        self.refusal = None;
        if self.stage == Order::Agreed {
            self.use_order()?;
        }
        let is_recorded = self.places.stream()?.is_some_and(|stream| stream.is_recording().unwrap_or(false));
        self.lane.set_recorded(is_recorded);
        self.progress.begin(self.places.bucket_of());
        self.places.begin()?;
        self.mode = Mode::Reducing;
        Ok(())
    }

    fn note_ready(&mut self, param: usize) -> std::result::Result<(), FunctionError> {
        self.arrived(param).map_err(|error| {
            let text = error.to_string();
            self.refusal.get_or_insert(error);
            text.into()
        })
    }

    fn refusal(&mut self) -> Option<ParallelError> {
        self.refusal.take()
    }

    fn finish(&mut self, meanwhile: Option<&mut dyn FnMut() -> Result>) -> Result {
        self.mode = Mode::Unexpected;
        let arrived = self.progress.order(&self.order);
        let sent = match meanwhile {
            None => self.send_rest(),
            Some(meanwhile) => self.send_rest_beside(meanwhile),
        };
        let used = match sent {
            Ok(used) => used,
            Err(error) => {
                self.abandon(&error.to_string());
                return Err(error);
            }
        };
        let used_anywhere = self.lane.wait()?.unwrap_or_default();
        self.places.settle(&used, &used_anywhere)?;
        self.log_unused(&used);
        if self.stage == Order::Guessed {
            self.agree_on_order(&arrived)?;
        }
        Ok(())
    }

    fn abandon(&mut self, cause: &str) {
        self.mode = Mode::Unexpected;
        self.group.abort(cause);
        self.places.abort(cause);
        let _ = self.lane.wait();
    }

    fn reduced_bytes(&self) -> Vec<usize> {
        self.places.bytes()
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        let order = if self.stage == Order::InUse { OrderKnown::Yes } else { OrderKnown::NotYet };
        self.places.is_recordable(order)
    }
}
