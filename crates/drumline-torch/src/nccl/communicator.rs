//! A communicator of NCCL: the ranks of one group, each with its GPU, and the calls they make together.
//!
//! A call is put on the communicator's own stream, after what the current stream has to do; the current stream goes on after it. The host
//! waits for neither, except for a first call between two GPUs, which makes their connection. So calls can be recorded in a graph.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use drumline_comm::{Announced, CommError, ProcessGroup};

use super::calls::{Calls, index};
use super::library::{Code, Config, IN_PROGRESS, Nccl, RawComm, SUCCESS, UniqueId};
use super::watcher::{Announcer, Outstanding, Parts, Watcher, Work};
use crate::cuda::{Event, Priority, Stream, Timing, set_device};
use crate::error::TorchError;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// How long the end of a communicator may take; after that it is left to the end of the process.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long an abort waits for a call that is just being made.
const LAST_CALL: Duration = Duration::from_secs(1);

/// The ranks of one group, each with its GPU. Dropping it ends its threads.
#[derive(Debug)]
pub(crate) struct Communicator {
    line: Arc<Line>,
    announcer: Announcer,
    watcher: Watcher,
}

/// What calls and watcher share: the way to NCCL.
#[derive(Debug)]
pub(super) struct Line {
    nccl: &'static Nccl,
    raw: RawComm,
    pub(super) stream: Stream,
    /// Held while a call is made; an abort waits for it, but not for long.
    gate: Mutex<()>,
    /// Graphs with calls that are just being launched, for which an abort waits as well.
    launches: AtomicUsize,
    /// Once raised, `raw` must not be used.
    is_closed: AtomicBool,
}

// SAFETY: NCCL's communicator belongs to no thread; calls are kept apart by `gate`, and NCCL allows an abort beside them.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

impl Communicator {
    /// Made by all ranks of the group together, of which rank 0 made the id. `companion` is a group of the same ranks.
    pub(crate) fn new(
        group: &ProcessGroup,
        companion: ProcessGroup,
        id: UniqueId,
        device: usize,
    ) -> Result<Self> {
        let (nccl, mut raw) = (Nccl::open()?, std::ptr::null_mut());
        set_device(device)?;
        let (size, rank, mut config) =
            (index(group.size())?, index(group.rank())?, Config::without_waiting());
        // SAFETY: fills the handle, and reads the configuration.
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
        let is_over = || group.standing().failure();
        line.settle(code, group.timeout(), &is_over).inspect_err(|_| line.abort())?;
        let announcer = Announcer::new(companion.clone()).map_err(no_thread)?;
        let watcher = Watcher::new(line.clone(), group, &companion).map_err(no_thread)?;
        Ok(Self { line, announcer, watcher })
    }

    /// An error if the group was given up, so that what calls have written is worth nothing.
    pub(crate) fn check(&self) -> Result {
        Ok(self.watcher.check()?)
    }

    /// Puts the calls that `body` makes on the stream as one, and lets the current stream go on after them.
    pub(crate) fn call(&self, call: Announced, body: impl FnOnce(&mut Calls) -> Result) -> Result {
        self.call_with(call, None, body)
    }

    /// As [`call`](Self::call), where lengths are each rank's own: the others are told of them, beside.
    pub(crate) fn call_in_parts(
        &self,
        call: Announced,
        parts: Parts,
        body: impl FnOnce(&mut Calls) -> Result,
    ) -> Result {
        self.call_with(call, Some(parts), body)
    }

    fn call_with(
        &self,
        call: Announced,
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
        // What is recorded does not run now, and its marks cannot be asked.
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
        // The others may be in a call for which this rank will not come. If one is gone, that is the better word.
        settled.map_err(|error| match error {
            TorchError::Refused { .. } => self.watcher.fail_soon(&error.to_string()).into(),
            other => other,
        })?;
        // Where it was aborted while it was made, nothing runs that could be waited for.
        self.check()
    }
}

impl Line {
    /// Several calls as one: NCCL starts them together.
    fn group(&self, body: impl FnOnce(&mut Calls) -> Result) -> Result<Code> {
        let doing = "a collective from GPU to GPU failed";
        let mut calls = Calls::new(self.nccl, self.raw, self.stream.raw()?);
        // SAFETY: takes nothing.
        self.nccl.check(unsafe { (self.nccl.group_start)() }, doing)?;
        let made = body(&mut calls);
        // SAFETY: takes nothing; the group must end also where a call in it was refused.
        let code = unsafe { (self.nccl.group_end)() };
        made?;
        self.nccl.check(code, doing)?;
        Ok(code)
    }

    /// Waits until NCCL has done what it goes on with on a thread of its own, such as making a connection.
    fn settle(&self, code: Code, timeout: Duration, is_over: &dyn Fn() -> Option<CommError>) -> Result {
        let (mut code, deadline) = (code, Instant::now() + timeout);
        while code == IN_PROGRESS {
            if let Some(cause) = is_over() {
                return Err(cause.into());
            }
            if Instant::now() > deadline {
                let message = format!("NCCL has not connected the GPUs after {timeout:?}");
                return Err(TorchError::Refused { doing: "cannot reach the other GPUs", message });
            }
            std::thread::sleep(Duration::from_micros(100));
            code = match self.state(&self.gate()) {
                Some(code) => code,
                // Closed meanwhile: its cause was noted before that.
                None => return Err(is_over().map_or_else(closed, TorchError::from)),
            };
        }
        self.nccl.check(code, "a collective from GPU to GPU failed")
    }

    /// How the communicator is: well, at work, or the error that it has run into; nothing if it is closed. Asking ends what NCCL did beside, so
    /// that only one may ask.
    fn state(&self, _gate: &MutexGuard<'_, ()>) -> Option<Code> {
        if self.is_closed.load(Ordering::Acquire) {
            return None;
        }
        let mut code = SUCCESS;
        // SAFETY: the communicator is not closed, nor can it be as long as the gate is held; fills one number.
        Some(match unsafe { (self.nccl.async_error)(self.raw, &mut code) } {
            SUCCESS => code,
            other => other,
        })
    }

    fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A graph with calls is being launched until this is dropped.
    pub(super) fn begin_launch(&self) -> Launch<'_> {
        self.launches.fetch_add(1, Ordering::AcqRel);
        Launch(self)
    }

    /// NCCL's words for how it is, if that is not well. While a call is made it is not asked.
    pub(super) fn trouble(&self) -> Option<String> {
        let gate = self.gate.try_lock().ok()?;
        match self.state(&gate)? {
            SUCCESS | IN_PROGRESS => None,
            code => Some(self.nccl.words(code)),
        }
    }

    /// Ends what is under way on the GPU, on a thread of its own: it may take long, and then is left alone. The driver is not asked for anything before: it may be busy until
    /// what is under way has ended. NCCL finds its GPU by itself.
    pub(super) fn abort(self: &Arc<Self>) {
        self.close(|nccl, raw| {
            // SAFETY: not used again.
            unsafe { (nccl.abort)(raw) };
        });
    }

    /// Ends a communicator on which nothing is under way.
    fn end(self: &Arc<Self>) {
        self.close(|nccl, raw| {
            let mut code = IN_PROGRESS;
            // SAFETY: not used again by others; asked until it is done, then freed.
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

    /// A call or a launch that hangs in the driver must not keep the abort from freeing it.
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
        // A group that was called off takes its companion along, or others would hear first that this rank has left that.
        self.watcher.spread_failure();
        self.announcer.end();
        match self.watcher.end() {
            Ok(()) => self.line.end(),
            Err(_) => self.line.abort(),
        }
    }
}

fn closed() -> TorchError {
    TorchError::Unfit("this communicator of NCCL was closed".into())
}

fn no_thread(error: std::io::Error) -> TorchError {
    TorchError::Unfit(format!("cannot start a thread that watches over NCCL: {error}"))
}
