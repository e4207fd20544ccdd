//! Streams: queues of work on a GPU, done in order. Events: marks in them, by which one stream waits for another.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;

use tch::Device;

use super::library::{Functions, functions};
use super::properties::{CurrentDevice, index};
use crate::error::TorchError;
use crate::status::check;

/// Whether what is put on the current stream of this device now is recorded for a graph, and not run.
pub(crate) fn is_recorded(device: Device) -> Result<bool, TorchError> {
    match device {
        Device::Cuda(device) => Stream::current(device)?.is_recording(),
        _ => Ok(false),
    }
}

/// As libtorch packs it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RawStream {
    pub(super) id: i64,
    pub(super) device: i32,
}

/// `c10::cuda::CUDAEvent`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CudaEvent {
    _opaque: [u8; 0],
}

/// Whether work of a stream goes before that of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Priority {
    /// As all.
    #[default]
    Normal,
    /// Before others, where both can run.
    High,
}

/// A queue of work on a GPU. Streams come from libtorch's own pool: copies of one are the same stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(pub(super) RawStream);

impl Stream {
    /// A stream beside the current one.
    pub fn new(device: usize, priority: Priority) -> Result<Self, TorchError> {
        let mut made = RawStream { id: 0, device: 0 };
        // SAFETY: fills one stream.
        let message =
            unsafe { (functions()?.stream_new)(index(device)?, priority == Priority::High, &mut made) };
        check(message, "cannot make a stream")?;
        Ok(Self(made))
    }

    /// The one that this thread's operations go to.
    pub fn current(device: usize) -> Result<Self, TorchError> {
        let mut found = RawStream { id: 0, device: 0 };
        // SAFETY: fills one stream.
        let message = unsafe { (functions()?.stream_current)(index(device)?, &mut found) };
        check(message, "cannot find the stream")?;
        Ok(Self(found))
    }

    /// Makes it the one that this thread's operations go to, and its GPU the current one, until the scope is dropped.
    pub fn enter(self) -> Result<StreamScope, TorchError> {
        let device = CurrentDevice::enter(self.device())?;
        Ok(StreamScope { before: self.make_current()?, _device: device, stays: PhantomData })
    }

    fn make_current(self) -> Result<Self, TorchError> {
        let mut before = self.0;
        // SAFETY: takes and fills a stream.
        check(unsafe { (functions()?.stream_enter)(self.0, &mut before) }, "cannot change the stream")?;
        Ok(Self(before))
    }

    /// Waits until all its work is done.
    pub fn synchronize(self) -> Result<(), TorchError> {
        // SAFETY: takes a stream.
        check(unsafe { (functions()?.stream_synchronize)(self.0) }, "work on the GPU failed")
    }

    /// Whether all its work is done.
    pub fn is_done(self) -> Result<bool, TorchError> {
        let mut done = false;
        // SAFETY: takes a stream and fills one bool.
        check(unsafe { (functions()?.stream_is_done)(self.0, &mut done) }, "work on the GPU failed")?;
        Ok(done)
    }

    /// Whether what is put on it now is recorded for a graph, and not run.
    pub fn is_recording(self) -> Result<bool, TorchError> {
        Ok(self.recording()?.is_some())
    }

    /// By what CUDA knows the recording that it is part of.
    pub(crate) fn recording(self) -> Result<Option<u64>, TorchError> {
        let mut id = 0;
        // SAFETY: takes a stream and fills one number.
        check(unsafe { (functions()?.stream_recording)(self.0, &mut id) }, "cannot look at a stream")?;
        Ok((id != 0).then_some(id))
    }

    /// What it does from now on comes after the mark.
    pub fn wait_for(self, event: &Event) -> Result<(), TorchError> {
        // SAFETY: the event lives.
        check(unsafe { (event.functions.event_block)(event.raw, self.0) }, "cannot wait for an event")
    }

    /// What it does from now on comes after all that `other` has to do now.
    pub fn wait_for_stream(self, other: Self) -> Result<(), TorchError> {
        let mark = Event::new(Timing::Off)?;
        mark.record(other)?;
        self.wait_for(&mark)
    }

    /// Its GPU.
    pub fn device(self) -> usize {
        usize::try_from(self.0.device).unwrap_or(0)
    }

    /// The `cudaStream_t`.
    pub fn raw(self) -> Result<*mut c_void, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: takes a stream and fills one pointer.
        check(unsafe { (functions()?.stream_raw)(self.0, &mut raw) }, "cannot look at a stream")?;
        Ok(raw)
    }
}

/// The thread's operations go to a stream until this is dropped.
#[derive(Debug)]
#[must_use = "the stream before is current again when this is dropped"]
pub struct StreamScope {
    before: Stream,
    /// Given back after the stream.
    _device: CurrentDevice,
    /// The current stream is the thread's.
    stays: PhantomData<*const ()>,
}

impl Drop for StreamScope {
    fn drop(&mut self) {
        // What was taken from libtorch is taken back by it.
        let _ = self.before.make_current();
    }
}

/// Whether an event keeps the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// It does.
    On,
    /// It is only waited for, which costs less.
    Off,
}

/// A mark in a stream.
#[derive(Debug)]
pub struct Event {
    raw: *mut CudaEvent,
    functions: &'static Functions,
}

// SAFETY: an event of CUDA may be used by any thread; libtorch's object is changed only by `record`, which takes it whole.
unsafe impl Send for Event {}

impl Event {
    /// An event that marks nothing yet.
    pub fn new(timing: Timing) -> Result<Self, TorchError> {
        let (functions, mut raw) = (functions()?, std::ptr::null_mut());
        // SAFETY: fills one pointer, which is ours from then on.
        check(unsafe { (functions.event_new)(timing == Timing::On, &mut raw) }, "cannot make an event")?;
        Ok(Self { raw, functions })
    }

    /// Marks the end of what the stream has to do now.
    pub fn record(&self, stream: Stream) -> Result<(), TorchError> {
        // SAFETY: the event lives.
        check(unsafe { (self.functions.event_record)(self.raw, stream.0) }, "cannot record an event")
    }

    /// Whether the work before the mark is done.
    pub fn is_done(&self) -> Result<bool, TorchError> {
        let mut done = false;
        // SAFETY: the event lives; fills one bool.
        check(unsafe { (self.functions.event_is_done)(self.raw, &mut done) }, "work on the GPU failed")?;
        Ok(done)
    }

    /// Waits until it is.
    pub fn synchronize(&self) -> Result<(), TorchError> {
        // SAFETY: the event lives.
        check(unsafe { (self.functions.event_synchronize)(self.raw) }, "work on the GPU failed")
    }

    /// Milliseconds from this mark to a later one; both keep the time and are done.
    pub fn milliseconds_to(&self, later: &Self) -> Result<f32, TorchError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; fills one number.
        let message = unsafe { (self.functions.event_milliseconds)(self.raw, later.raw, &mut milliseconds) };
        check(message, "cannot take the time between events")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again.
        unsafe { (self.functions.event_free)(self.raw) }
    }
}
