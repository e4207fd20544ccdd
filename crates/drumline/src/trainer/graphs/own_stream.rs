//! The stream that a training on a GPU runs on.

use drumline_torch::TorchError;
use drumline_torch::cuda::{Priority, Stream, StreamScope};
use tch::Device;

/// Makes a stream of its own current until this is dropped. Its work starts after what the caller's stream has queued,
/// and what the caller queues next starts after it.
pub(in crate::trainer) struct OwnStream {
    own: Stream,
    outside: Stream,
    scope: Option<StreamScope>,
}

impl OwnStream {
    pub(in crate::trainer) fn enter(device: Device) -> Result<Option<Self>, TorchError> {
        let Device::Cuda(index) = device else { return Ok(None) };
        let (own, outside) = (Stream::new(index, Priority::Normal)?, Stream::current(index)?);
        own.wait_for_stream(outside)?;
        Ok(Some(Self { own, outside, scope: Some(own.enter()?) }))
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        drop(self.scope.take());
        // If the GPU fails here, the next call that uses it returns the error.
        let _ = self.outside.wait_for_stream(self.own);
    }
}
