//! CUDA graphs: work that a thread queues on a stream, recorded once and launched as a whole.
//!
//! A launch takes microseconds of CPU time, while the same operations in eager mode take milliseconds. The graph keeps
//! the memory that was used during the recording: each launch overwrites the tensors made then.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::library::{Functions, functions};
use super::memory::empty_cache;
use crate::error::TorchError;
use crate::status::check;

/// `at::cuda::CUDAGraph`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CudaGraph {
    _opaque: [u8; 0],
}

/// libtorch's id of a memory pool.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawPool {
    first: u64,
    second: u64,
}

/// A memory pool for graphs that never run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool(RawPool);

impl Pool {
    /// A pool that no graph uses yet.
    pub fn new() -> Result<Self, TorchError> {
        let mut made = RawPool { first: 0, second: 0 };
        // SAFETY: writes two numbers.
        check(unsafe { (functions()?.pool_new)(&mut made) }, "cannot make a memory pool")?;
        Ok(Self(made))
    }
}

/// Has calls in a recording, and must watch that they end after each launch.
pub(crate) trait Follower: std::fmt::Debug + Send + Sync {
    /// Calls `launch`, which launches the graph on the current stream. Returns an error if its group has failed.
    fn launch(
        &self,
        launched: Launched,
        launch: &mut dyn FnMut() -> Result<(), TorchError>,
    ) -> Result<(), TorchError>;
}

/// A launch of a graph, as a follower sees it.
#[derive(Debug, Clone)]
pub(crate) struct Launched {
    /// The training step, if it is known.
    pub(crate) step: Option<u64>,
    /// The follower's calls in it, in order.
    pub(crate) calls: Arc<[String]>,
}

/// A follower with calls in a recording.
#[derive(Debug)]
struct Followed {
    /// CUDA's id of the recording.
    recording: u64,
    follower: Weak<dyn Follower>,
    calls: Vec<String>,
}

/// The followers of all current recordings. Any thread records calls: backward has its own.
static FOLLOWERS: Mutex<Vec<Followed>> = Mutex::new(Vec::new());

fn followers() -> MutexGuard<'static, Vec<Followed>> {
    FOLLOWERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes a call that is being recorded.
pub(crate) fn follow_launches(recording: u64, follower: Weak<dyn Follower>, call: String) {
    let mut all = followers();
    match all.iter_mut().find(|known| known.recording == recording && known.follower.ptr_eq(&follower)) {
        Some(known) => known.calls.push(call),
        None => all.push(Followed { recording, follower, calls: vec![call] }),
    }
}

/// Removes and returns the followers of a recording that has ended.
fn take_followers(recording: u64) -> Vec<Followed> {
    followers().extract_if(.., |known| known.recording == recording).collect()
}

/// A follower of a graph, with its calls in the graph, in order.
#[derive(Debug)]
struct Recorded {
    follower: Weak<dyn Follower>,
    calls: Arc<[String]>,
}

/// A recorded graph.
#[derive(Debug)]
pub struct Graph {
    raw: *mut CudaGraph,
    functions: &'static Functions,
    followers: Vec<Recorded>,
}

// SAFETY: libtorch's object is not bound to a thread; it changes only during recording, which owns it.
unsafe impl Send for Graph {}

impl Graph {
    /// Records the work that `body` queues on the current stream, which must not be the default stream. None of it
    /// runs. Each launch draws new random numbers, the same that eager mode would have drawn.
    ///
    /// `body` must not read a tensor's values, wait for the GPU, or allocate pinned memory; that is an error, and
    /// nothing is recorded. After such an error do not use a pool again that no other graph uses.
    pub fn record<R, E: From<TorchError>>(
        pool: Pool,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<(Self, R), E> {
        // A graph has memory of its own. What eager steps have kept for their next ones would stay unused beside it.
        empty_cache()?;
        let (functions, mut raw) = (functions().map_err(TorchError::from)?, std::ptr::null_mut());
        // SAFETY: writes one pointer, which we own from then on.
        check(unsafe { (functions.graph_new)(&mut raw) }, "cannot make a graph")?;
        let mut graph = Self { raw, functions, followers: Vec::new() };
        let mut recording = 0;
        // SAFETY: the graph lives; writes one number.
        let begun = unsafe { (functions.graph_begin)(graph.raw, pool.0, &mut recording) };
        check(begun, "cannot begin to record")?;
        let made = catch_unwind(AssertUnwindSafe(body));
        // SAFETY: the graph lives. The recording must end even if `body` failed.
        let ended = check(
            unsafe { (functions.graph_end)(graph.raw, pool.0) },
            "what was recorded cannot be launched",
        );
        let followed = take_followers(recording).into_iter();
        graph.followers =
            followed.map(|one| Recorded { follower: one.follower, calls: one.calls.into() }).collect();
        let made = made.unwrap_or_else(|panic| resume_unwind(panic))?;
        ended?;
        Ok((graph, made))
    }

    /// Launches it on the current stream. An error if it has collectives and their group has failed, even if that
    /// happened in an earlier launch, which could not report it.
    pub fn launch(&self) -> Result<(), TorchError> {
        self.launch_for(&self.followers, None)
    }

    /// The same for a training step: errors about collectives that do not end name the step.
    pub fn launch_as_step(&self, step: u64) -> Result<(), TorchError> {
        self.launch_for(&self.followers, Some(step))
    }

    fn launch_for(&self, followers: &[Recorded], step: Option<u64>) -> Result<(), TorchError> {
        match followers {
            // SAFETY: the graph lives.
            [] => check(unsafe { (self.functions.graph_replay)(self.raw) }, "cannot launch a graph"),
            [Recorded { follower, calls }, rest @ ..] => match follower.upgrade() {
                Some(first) => {
                    let launched = Launched { step, calls: Arc::clone(calls) };
                    first.launch(launched, &mut || self.launch_for(rest, step))
                }
                None => Err(TorchError::GraphOutlivesGroup),
            },
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: we own it, and do not use it again.
        unsafe { (self.functions.graph_free)(self.raw) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Counting;

    impl Follower for Counting {
        fn launch(
            &self,
            _: Launched,
            launch: &mut dyn FnMut() -> Result<(), TorchError>,
        ) -> Result<(), TorchError> {
            launch()
        }
    }

    #[test]
    fn simultaneous_recordings_have_separate_followers() {
        let all = [Counting, Counting].map(Arc::new);
        let follow = |recording: u64, index: usize, call: &str| {
            let follower: Weak<Counting> = Arc::downgrade(&all[index]);
            follow_launches(recording, follower, call.to_owned());
        };
        // Ids that no recording has.
        let [first, second] = [u64::MAX, u64::MAX - 1];
        follow(first, 0, "a");
        follow(second, 1, "b");
        follow(first, 1, "c");
        follow(first, 1, "d");
        let of_second = take_followers(second);
        assert_eq!(
            (of_second.len(), of_second[0].follower.ptr_eq(&(Arc::downgrade(&all[1]) as Weak<dyn Follower>))),
            (1, true)
        );
        let of_first: Vec<_> = take_followers(first).into_iter().map(|one| one.calls).collect();
        assert_eq!(of_first, [vec!["a"], vec!["c", "d"]], "each has its calls, in order");
        assert!(take_followers(first).is_empty());
    }
}
