//! Streams and events of CUDA. A stream is a queue of work on a GPU; a stream can wait for an event in another stream.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;

use tch::Device;

use super::library::{Functions, functions};
use super::properties::{CurrentDevice, index};
use crate::error::TorchError;
use crate::status::check;

/// Whether the current stream of this device is being recorded in a CUDA graph.
pub(crate) fn is_recorded(device: Device) -> Result<bool, TorchError> {
    match device {
        Device::Cuda(device) => Stream::current(device)?.is_recording(),
        _ => Ok(false),
    }
}

/// libtorch's id of a stream.
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

/// The priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Priority {
    /// The default.
    #[default]
    Normal,
    /// Before other streams, if both can run.
    High,
}

/// A queue of work on a GPU. Streams come from libtorch's pool; copies are the same stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(pub(super) RawStream);

impl Stream {
    /// Another stream than the default one.
    pub fn new(device: usize, priority: Priority) -> Result<Self, TorchError> {
        let mut made = RawStream { id: 0, device: 0 };
        // SAFETY: fills one stream.
        let message =
            unsafe { (functions()?.stream_new)(index(device)?, priority == Priority::High, &mut made) };
        check(message, "cannot make a stream")?;
        Ok(Self(made))
    }

    /// The current stream of this thread.
    pub fn current(device: usize) -> Result<Self, TorchError> {
        let mut found = RawStream { id: 0, device: 0 };
        // SAFETY: fills one stream.
        let message = unsafe { (functions()?.stream_current)(index(device)?, &mut found) };
        check(message, "cannot get the current stream")?;
        Ok(Self(found))
    }

    /// Makes it the current stream of this thread, and its GPU the current device, until the scope is dropped.
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

    /// Whether it is being recorded in a CUDA graph.
    pub fn is_recording(self) -> Result<bool, TorchError> {
        Ok(self.recording()?.is_some())
    }

    /// CUDA's id of the recording that it is part of.
    pub(crate) fn recording(self) -> Result<Option<u64>, TorchError> {
        let mut id = 0;
        // SAFETY: takes a stream and fills one number.
        check(unsafe { (functions()?.stream_recording)(self.0, &mut id) }, "cannot inspect a stream")?;
        Ok((id != 0).then_some(id))
    }

    /// Later work on this stream waits for the event.
    pub fn wait_for(self, event: &Event) -> Result<(), TorchError> {
        // SAFETY: the event lives.
        check(unsafe { (event.functions.event_block)(event.raw, self.0) }, "cannot wait for an event")
    }

    /// Later work on this stream waits for all current work of `other`.
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
        check(unsafe { (functions()?.stream_raw)(self.0, &mut raw) }, "cannot inspect a stream")?;
        Ok(raw)
    }
}

/// A stream is the current one until this is dropped.
#[derive(Debug)]
#[must_use = "the previous stream is current again when this is dropped"]
pub struct StreamScope {
    before: Stream,
    /// Restored after the stream.
    _device: CurrentDevice,
    /// The current stream belongs to the thread.
    stays: PhantomData<*const ()>,
}

impl Drop for StreamScope {
    fn drop(&mut self) {
        // Restoring what libtorch returned does not fail.
        let _ = self.before.make_current();
    }
}

/// Whether an event records the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// It does. Needed for [`Event::milliseconds_to`].
    On,
    /// It does not, which costs less.
    Off,
}

/// An event of CUDA: a mark in a stream.
#[derive(Debug)]
pub struct Event {
    raw: *mut CudaEvent,
    functions: &'static Functions,
}

// SAFETY: any thread may use an event of CUDA; only `record` changes libtorch's object.
unsafe impl Send for Event {}

impl Event {
    /// An event that is not recorded yet.
    pub fn new(timing: Timing) -> Result<Self, TorchError> {
        let (functions, mut raw) = (functions()?, std::ptr::null_mut());
        // SAFETY: writes one pointer, which we own from then on.
        check(unsafe { (functions.event_new)(timing == Timing::On, &mut raw) }, "cannot make an event")?;
        Ok(Self { raw, functions })
    }

    /// Marks the end of the current work of the stream.
    pub fn record(&self, stream: Stream) -> Result<(), TorchError> {
        // SAFETY: the event lives.
        check(unsafe { (self.functions.event_record)(self.raw, stream.0) }, "cannot record an event")
    }

    /// Whether the work before the event is done.
    pub fn is_done(&self) -> Result<bool, TorchError> {
        let mut done = false;
        // SAFETY: the event lives; fills one bool.
        check(unsafe { (self.functions.event_is_done)(self.raw, &mut done) }, "work on the GPU failed")?;
        Ok(done)
    }

    /// Waits until the work before the event is done.
    pub fn synchronize(&self) -> Result<(), TorchError> {
        // SAFETY: the event lives.
        check(unsafe { (self.functions.event_synchronize)(self.raw) }, "work on the GPU failed")
    }

    /// Milliseconds from this event to a later one. Both record the time and are done.
    pub fn milliseconds_to(&self, later: &Self) -> Result<f32, TorchError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; fills one number.
        let message = unsafe { (self.functions.event_milliseconds)(self.raw, later.raw, &mut milliseconds) };
        check(message, "cannot measure the time between events")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: we own it, and do not use it again.
        unsafe { (self.functions.event_free)(self.raw) }
    }
}
