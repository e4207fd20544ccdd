//! Graphs: what a thread puts on a stream, recorded once and launched as a whole.
//!
//! A launch costs microseconds where the operations one by one cost milliseconds of the processor's time. The memory that was
//! used while recording stays the graph's: tensors made then are overwritten by each launch.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::library::{Functions, functions};
use crate::error::TorchError;
use crate::status::check;

/// `at::cuda::CUDAGraph`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CudaGraph {
    _opaque: [u8; 0],
}

/// As libtorch numbers it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawPool {
    first: u64,
    second: u64,
}

/// Memory for graphs that never run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool(RawPool);

impl Pool {
    /// A pool that no graph uses yet.
    pub fn new() -> Result<Self, TorchError> {
        let mut made = RawPool { first: 0, second: 0 };
        // SAFETY: fills two numbers.
        check(unsafe { (functions()?.pool_new)(&mut made) }, "cannot make a pool of memory")?;
        Ok(Self(made))
    }
}

/// Someone whose calls were recorded, and who must see that they end.
pub(crate) trait Follower: std::fmt::Debug + Send + Sync {
    /// Has a graph with such calls launched on the current stream, unless they cannot be made any more.
    fn launch(
        &self,
        launched: Launched,
        launch: &mut dyn FnMut() -> Result<(), TorchError>,
    ) -> Result<(), TorchError>;
}

/// A graph that is launched: what of it its follower must see the end of.
#[derive(Debug, Clone)]
pub(crate) struct Launched {
    /// The step of the training that it is, if that is known.
    pub(crate) step: Option<u64>,
    /// The follower's calls in it, in order.
    pub(crate) calls: Arc<[String]>,
}

/// One whose calls are part of a recording.
#[derive(Debug)]
struct Followed {
    /// By what CUDA knows it.
    recording: u64,
    follower: Weak<dyn Follower>,
    calls: Vec<String>,
}

/// Those of the recordings under way. Calls are recorded by any thread: backward has its own.
static FOLLOWERS: Mutex<Vec<Followed>> = Mutex::new(Vec::new());

fn followers() -> MutexGuard<'static, Vec<Followed>> {
    FOLLOWERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call is being recorded.
pub(crate) fn follow_launches(recording: u64, follower: Weak<dyn Follower>, call: String) {
    let mut all = followers();
    match all.iter_mut().find(|known| known.recording == recording && known.follower.ptr_eq(&follower)) {
        Some(known) => known.calls.push(call),
        None => all.push(Followed { recording, follower, calls: vec![call] }),
    }
}

/// Those of this recording, which has ended.
fn take_followers(recording: u64) -> Vec<Followed> {
    followers().extract_if(.., |known| known.recording == recording).collect()
}

/// A follower of a graph, with its calls in it, in order.
#[derive(Debug)]
struct Recorded {
    follower: Weak<dyn Follower>,
    calls: Arc<[String]>,
}

/// Recorded work.
#[derive(Debug)]
pub struct Graph {
    raw: *mut CudaGraph,
    functions: &'static Functions,
    followers: Vec<Recorded>,
}

// SAFETY: libtorch's object belongs to no thread; it is changed only while it is recorded, which takes it whole.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `body` puts on the current stream, which must not be the device's default one. Nothing of it runs. Random numbers
    /// that it draws are new ones in each launch, those that it would have drawn one by one.
    ///
    /// `body` must not read a tensor's values, wait for the GPU, or allocate pinned memory; the error then says so, and nothing
    /// was recorded. A pool that no other graph uses is spent by that: the next recording takes a new one.
    pub fn record<R, E: From<TorchError>>(
        pool: Pool,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<(Self, R), E> {
        let (functions, mut raw) = (functions().map_err(TorchError::from)?, std::ptr::null_mut());
        // SAFETY: fills one pointer, which is ours from then on.
        check(unsafe { (functions.graph_new)(&mut raw) }, "cannot make a graph")?;
        let mut graph = Self { raw, functions, followers: Vec::new() };
        let mut recording = 0;
        // SAFETY: the graph lives; fills one number.
        let begun = unsafe { (functions.graph_begin)(graph.raw, pool.0, &mut recording) };
        check(begun, "cannot begin to record")?;
        let made = catch_unwind(AssertUnwindSafe(body));
        // SAFETY: the graph lives. The recording must end also where `body` failed.
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

    /// Launches it on the current stream. An error if it has calls to other ranks, and their group was given up: also where that was in the launch
    /// before, of which nobody was told.
    pub fn launch(&self) -> Result<(), TorchError> {
        self.launch_for(&self.followers, None)
    }

    /// The same as a step of a training: errors about calls to other ranks that do not end name it.
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
                None => Err(TorchError::Unfit(
                    "a graph has calls to other ranks, and their group has ended; try dropping the graph first".into(),
                )),
            },
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again.
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
    fn recordings_at_the_same_time_have_each_its_followers() {
        let all = [Counting, Counting].map(Arc::new);
        let follow = |recording: u64, index: usize, call: &str| {
            let follower: Weak<Counting> = Arc::downgrade(&all[index]);
            follow_launches(recording, follower, call.to_owned());
        };
        // Numbers that no recording has.
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
        assert_eq!(of_first, [vec!["a"], vec!["c", "d"]], "each with its calls, in their order");
        assert!(take_followers(first).is_empty());
    }
}
