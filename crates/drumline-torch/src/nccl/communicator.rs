//! An NCCL communicator: the ranks of one group, each with its GPU, and the calls that they make together.
//!
//! A call runs on the communicator's own stream. It waits for the current work of the current stream, whose later work
//! waits for the call. The host does not wait, except in a first call between two GPUs, which connects them. So calls
//! can be recorded in a CUDA graph.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use drumline_comm::{CommError, ExternalCall, ProcessGroup};

use super::calls::{Calls, index};
use super::library::{Code, Config, IN_PROGRESS, Nccl, RawComm, SUCCESS, UniqueId};
use super::watcher::{Announcer, Outstanding, Parts, Watcher, Work};
use crate::cuda::{Event, Priority, Stream, Timing, set_device};
use crate::error::TorchError;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// How long closing a communicator may take. After that it is left open until the process ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long an abort waits for a call that is being made.
const LAST_CALL: Duration = Duration::from_secs(1);

/// The ranks of one group, each with its GPU. Dropping it joins its threads.
#[derive(Debug)]
pub(crate) struct Communicator {
    line: Arc<Line>,
    announcer: Announcer,
    watcher: Watcher,
}

/// The NCCL communicator itself, which calls and watcher share.
#[derive(Debug)]
pub(super) struct Line {
    nccl: &'static Nccl,
    raw: RawComm,
    pub(super) stream: Stream,
    /// Held while a call is made; an abort waits for it up to `LAST_CALL`.
    gate: Mutex<()>,
    /// The number of graphs that are being launched; an abort waits for them as well.
    launches: AtomicUsize,
    /// Once this is true, `raw` must not be used.
    is_closed: AtomicBool,
}

// SAFETY: NCCL's communicator is not bound to a thread. `gate` serialises calls, and NCCL allows an abort at any time.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

impl Communicator {
    /// All ranks of the group call it together; rank 0 made the id. `companion` is a group of the same ranks.
    pub(crate) fn new(
        group: &ProcessGroup,
        companion: &ProcessGroup,
        id: UniqueId,
        device: usize,
    ) -> Result<Self> {
        let (nccl, mut raw) = (Nccl::open()?, std::ptr::null_mut());
        set_device(device)?;
        let (size, rank, mut config) =
            (index(group.size())?, index(group.rank())?, Config::without_waiting());
        // SAFETY: writes the handle, and reads the configuration.
        let code = unsafe { (nccl.init_rank)(&mut raw, size, id, rank, &mut config) };
        nccl.check(code, "cannot make a communicator of NCCL")?;
        let stream = Stream::new(device, Priority::High)?;
        let line = Arc::new(Line {
            nccl,
            raw,
            stream,
            gate: Mutex::new(()),
            launches: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
        });
        let is_over = || group.status().failure();
        line.settle(code, group.timeout(), &is_over).inspect_err(|_| line.abort())?;
        let announcer = Announcer::new(companion.clone()).map_err(no_thread)?;
        let watcher = Watcher::new(line.clone(), group, companion).map_err(no_thread)?;
        Ok(Self { line, announcer, watcher })
    }

    /// An error if the group has failed, so that the results of calls are invalid.
    pub(crate) fn check(&self) -> Result {
        Ok(self.watcher.check()?)
    }

    /// Queues the calls of `body` as one NCCL group, and makes the current stream wait for it.
    pub(crate) fn call(&self, call: ExternalCall, body: impl FnOnce(&mut Calls) -> Result) -> Result {
        self.call_with(call, None, body)
    }

    /// Like [`call`](Self::call), for lengths that differ between ranks. The announcer compares them with those of
    /// other ranks.
    pub(crate) fn call_in_parts(
        &self,
        call: ExternalCall,
        parts: Parts,
        body: impl FnOnce(&mut Calls) -> Result,
    ) -> Result {
        self.call_with(call, Some(parts), body)
    }

    fn call_with(
        &self,
        call: ExternalCall,
        parts: Option<Parts>,
        body: impl FnOnce(&mut Calls) -> Result,
    ) -> Result {
        self.watcher.check()?;
        let Line { stream, .. } = *self.line;
        let current = Stream::current(stream.device())?;
        let recording = current.recording()?;
        self.announcer.announce(call, parts);
        stream.wait_for_stream(current)?;
        self.make(body)?;
        let done = Event::new(Timing::Off)?;
        done.record(stream)?;
        current.wait_for(&done)?;
        // Recorded work does not run now, and its events cannot be queried.
        match recording {
            Some(recording) => self.watcher.follow_launches(recording, &call),
            None => self.watcher.follow(Outstanding { done: Some(done), work: Work::call(call) }),
        }
        Ok(())
    }

    fn make(&self, body: impl FnOnce(&mut Calls) -> Result) -> Result {
        let made = {
            let _gate = self.line.gate();
            self.watcher.check()?;
            self.line.group(body)
        };
        let settled =
            made.and_then(|code| self.line.settle(code, self.watcher.timeout, &|| self.watcher.failure()));
        // The others may wait in a call that this rank does not make. If a rank is lost, that is the better error.
        settled.map_err(|error| match error {
            TorchError::Library { .. } => self.watcher.fail_soon(&error.to_string()).into(),
            other => other,
        })?;
        // If the group failed meanwhile, nothing runs that could be waited for.
        self.check()
    }
}

impl Line {
    /// Runs `body` as one NCCL group, whose calls start together.
    fn group(&self, body: impl FnOnce(&mut Calls) -> Result) -> Result<Code> {
        let operation = "a collective from GPU to GPU failed";
        let mut calls = Calls::new(self.nccl, self.raw, self.stream.raw()?);
        // SAFETY: no arguments.
        self.nccl.check(unsafe { (self.nccl.group_start)() }, operation)?;
        let made = body(&mut calls);
        // SAFETY: no arguments. The group must end even if a call in it failed.
        let code = unsafe { (self.nccl.group_end)() };
        made?;
        self.nccl.check(code, operation)?;
        Ok(code)
    }

    /// Waits until NCCL has finished its work in the background, such as connecting GPUs.
    fn settle(&self, code: Code, timeout: Duration, is_over: &dyn Fn() -> Option<CommError>) -> Result {
        let (mut code, deadline) = (code, Instant::now() + timeout);
        while code == IN_PROGRESS {
            if let Some(cause) = is_over() {
                return Err(cause.into());
            }
            if Instant::now() > deadline {
                let message = format!("NCCL has not connected the GPUs after {timeout:?}");
                return Err(TorchError::Library { operation: "cannot reach the other GPUs", message });
            }
            std::thread::sleep(Duration::from_micros(100));
            code = match self.state(&self.gate()) {
                Some(code) => code,
                // It was closed meanwhile, and the cause was noted before.
                None => return Err(is_over().map_or_else(closed, TorchError::from)),
            };
        }
        self.nccl.check(code, "a collective from GPU to GPU failed")
    }

    /// The state of the communicator: success, in progress, or an error; `None` if it is closed. The query completes
    /// background work of NCCL, so that only one thread at a time may make it.
    fn state(&self, _gate: &MutexGuard<'_, ()>) -> Option<Code> {
        if self.is_closed.load(Ordering::Acquire) {
            return None;
        }
        let mut code = SUCCESS;
        // SAFETY: the communicator is open, and stays open while the gate is held; writes one number.
        Some(match unsafe { (self.nccl.async_error)(self.raw, &mut code) } {
            SUCCESS => code,
            other => other,
        })
    }

    fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a launch of a graph until the result is dropped.
    pub(super) fn begin_launch(&self) -> Launch<'_> {
        self.launches.fetch_add(1, Ordering::AcqRel);
        Launch(self)
    }

    /// NCCL's error, if it has one. `None` while a call is being made.
    pub(super) fn trouble(&self) -> Option<String> {
        let gate = self.gate.try_lock().ok()?;
        match self.state(&gate)? {
            SUCCESS | IN_PROGRESS => None,
            code => Some(self.nccl.error_text(code)),
        }
    }

    /// Aborts the work on the GPU, on another thread: if it takes too long, this returns before it has ended. It makes
    /// no call to the driver before, because the driver may block until that work has ended. NCCL selects its GPU by
    /// itself.
    pub(super) fn abort(self: &Arc<Self>) {
        self.close(|nccl, raw| {
            // SAFETY: not used again.
            unsafe { (nccl.abort)(raw) };
        });
    }

    /// Closes a communicator without outstanding work.
    fn end(self: &Arc<Self>) {
        self.close(|nccl, raw| {
            let mut code = IN_PROGRESS;
            // SAFETY: nobody else uses it any more. It is polled until it is done, then freed.
            unsafe {
                (nccl.finalize)(raw);
                let deadline = Instant::now() + FAREWELL;
                while code == IN_PROGRESS && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                    (nccl.async_error)(raw, &mut code);
                }
                if code == SUCCESS {
                    (nccl.destroy)(raw)
                } else {
                    (nccl.abort)(raw)
                };
            }
        });
    }

    fn close(self: &Arc<Self>, how: impl FnOnce(&Nccl, RawComm) + Send + 'static) {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.wait_for_others();
        let (line, (done, ended)) = (self.clone(), std::sync::mpsc::channel());
        let run = move || {
            how(line.nccl, line.raw);
            let _ = done.send(());
        };
        if std::thread::Builder::new().name("nccl-end".into()).spawn(run).is_ok() {
            let _ = ended.recv_timeout(FAREWELL);
        }
    }

    /// Waits for calls and launches, but not for long: one that hangs in the driver needs the abort.
    fn wait_for_others(&self) {
        let is_busy = || {
            matches!(self.gate.try_lock(), Err(TryLockError::WouldBlock))
                || self.launches.load(Ordering::Acquire) > 0
        };
        let deadline = Instant::now() + LAST_CALL;
        while is_busy() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// See [`Line::begin_launch`].
pub(super) struct Launch<'a>(&'a Line);

impl Drop for Launch<'_> {
    fn drop(&mut self) {
        self.0.launches.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // If the group has failed, its companion must fail as well, or others would first see that this rank left it.
        self.watcher.spread_failure();
        self.announcer.end();
        match self.watcher.end() {
            Ok(()) => self.line.end(),
            Err(_) => self.line.abort(),
        }
    }
}

fn closed() -> TorchError {
    TorchError::Unsupported { operation: "call other GPUs", reason: "the NCCL communicator was closed" }
}

fn no_thread(cause: std::io::Error) -> TorchError {
    TorchError::Thread { what: "a thread that watches NCCL", cause }
}
