//! Asynchronous calls: collectives that run while the program does something else.
//!
//! A scope lends the group a thread. The calls that are started in the scope run there one after the other, in the order in
//! which they were started, which is the same on all ranks. The scope ends only when all its calls have ended. So a started
//! call may borrow the program's buffers, and the borrow checker keeps the program from using them until it is done.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use drumline_rendezvous::panic_text;

use super::ProcessGroup;
use super::p2p::ScopeMessages;
use crate::error::CommError;

type Job<'scope> = Box<dyn FnOnce() + Send + 'scope>;

/// Counts the started calls that have not ended. Direct calls wait for them, so that the order is the program's.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pending: Mutex<usize>,
    empty: Condvar,
    busy: AtomicBool,
}

thread_local! {
    /// The queue whose started call this thread runs: calls made inside it must not wait for the queue.
    static STARTED_ON: Cell<usize> = const { Cell::new(0) };
}

impl Queue {
    #[inline]
    pub(super) fn wait_until_empty(&self) {
        if !self.busy.load(Ordering::Acquire) || STARTED_ON.get() == std::ptr::from_ref(self).addr() {
            return;
        }
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.empty.wait_while(pending, |pending| *pending > 0));
    }

    fn enter(&self) {
        *self.pending.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.busy.store(true, Ordering::Release);
    }

    fn leave(&self) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        *pending -= 1;
        if *pending == 0 {
            self.busy.store(false, Ordering::Release);
            self.empty.notify_all();
        }
    }
}

/// Where calls are started; see [`ProcessGroup::scope`].
pub struct Scope<'scope, 'env> {
    group: &'env ProcessGroup,
    threads: &'scope std::thread::Scope<'scope, 'env>,
    jobs: OnceLock<mpsc::Sender<Job<'scope>>>,
    messages: ScopeMessages<'scope>,
    /// For each started call, a function that takes its error if nobody has waited for it.
    unwaited: Mutex<Vec<TakeError<'scope>>>,
}

type TakeError<'scope> = Box<dyn Fn() -> Option<CommError> + Send + 'scope>;

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("group", &self.group.name()).finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// Runs `body`, which may start calls that run in the background; returns when all of them have ended.
    /// If nobody waited for a started call, its error is returned here.
    ///
    /// ```
    /// use drumline_comm::{LocalGroup, ReduceOp};
    ///
    /// LocalGroup::run(2, |group| {
    ///     let mut gradients = vec![1.0f32; 1000];
    ///     let answer = group.scope(|scope| {
    ///         let work = scope.start(|group| group.all_reduce(&mut gradients, ReduceOp::Sum));
    ///         let answer = 6 * 7; // while the gradients are reduced
    ///         work.wait()?;
    ///         Ok(answer)
    ///     })?;
    ///     assert_eq!((answer, gradients[0]), (42, 2.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    pub fn scope<'env, R>(
        &'env self,
        body: impl for<'scope> FnOnce(&Scope<'scope, 'env>) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        std::thread::scope(|threads| {
            let (jobs, messages, unwaited) = (OnceLock::new(), ScopeMessages::default(), Mutex::default());
            let scope = Scope { group: self, threads, jobs, messages, unwaited };
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| body(&scope)));
            let settled = scope.settle(!matches!(outcome, Ok(Ok(_))));
            let outcome = outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            settled?;
            scope.first_unwaited_error().map_or(Ok(outcome), Err)
        })
    }
}

impl ProcessGroup {
    /// A started call panicked, so this rank may have skipped calls that the others make.
    #[cold]
    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> CommError {
        let cause = format!("a started call panicked: {}", panic_text(panic));
        self.call_off(CommError::CalledOff {
            group: self.inner.state.group.clone(),
            by: self.members()[self.rank()],
            cause,
            recoverable: false,
        })
    }
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Starts a call (or several, made one after the other by `call`) and returns at once.
    ///
    /// Started calls run in the order of starting; all ranks must start the same ones in the same order.
    pub fn start<R: Send + 'scope>(
        &self,
        call: impl FnOnce(&ProcessGroup) -> Result<R, CommError> + Send + 'scope,
    ) -> Work<R> {
        let slot = Arc::new(Slot { outcome: Mutex::new(None), done: Condvar::new() });
        let (result, group) = (slot.clone(), ProcessGroup { inner: self.group.inner.clone(), started: true });
        group.inner.queue.enter();
        let job = Box::new(move || {
            STARTED_ON.set(std::ptr::from_ref(&group.inner.queue).addr());
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| call(&group)));
            result.put(outcome.unwrap_or_else(|panic| Err(group.panicked(&*panic))));
            group.inner.queue.leave();
        });
        let left = slot.clone();
        let take_error = Box::new(move || left.take_error());
        self.unwaited.lock().unwrap_or_else(PoisonError::into_inner).push(take_error);
        // The receiver lives until this sender is dropped, so the job always runs.
        let _ = self.jobs.get_or_init(|| self.spawn()).send(job);
        Work { slot }
    }

    /// The first error that nobody has seen. Waits until all started calls have ended.
    fn first_unwaited_error(&self) -> Option<CommError> {
        let unwaited = self.unwaited.lock().unwrap_or_else(PoisonError::into_inner);
        if !unwaited.is_empty() {
            self.group.inner.queue.wait_until_empty();
        }
        unwaited.iter().find_map(|take_error| take_error())
    }

    pub(super) fn group(&self) -> &'env ProcessGroup {
        self.group
    }

    pub(super) fn messages(&self) -> &ScopeMessages<'scope> {
        &self.messages
    }

    fn spawn(&self) -> mpsc::Sender<Job<'scope>> {
        let (jobs, receiver) = mpsc::channel::<Job<'scope>>();
        self.threads.spawn(move || receiver.into_iter().for_each(|job| job()));
        jobs
    }
}

/// A started call.
#[derive(Debug)]
#[must_use = "a started call's error is in its `Work`"]
pub struct Work<R = ()> {
    slot: Arc<Slot<R>>,
}

#[derive(Debug)]
struct Slot<R> {
    outcome: Mutex<Option<Result<R, CommError>>>,
    done: Condvar,
}

impl<R> Slot<R> {
    fn take_error(&self) -> Option<CommError> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take_if(|outcome| outcome.is_err())?.err()
    }

    fn put(&self, outcome: Result<R, CommError>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.done.notify_all();
    }
}

impl<R> Work<R> {
    /// Whether the call has ended, well or badly.
    pub fn is_done(&self) -> bool {
        self.slot.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Waits until the call has ended and returns its outcome.
    pub fn wait(self) -> Result<R, CommError> {
        let outcome = self.slot.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let mut outcome = self
            .slot
            .done
            .wait_while(outcome, |outcome| outcome.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        outcome.take().unwrap_or_else(|| Err(CommError::invalid("the call's outcome was taken before")))
    }
}
