//! Calls whose data is moved by another library, such as NCCL between GPUs. The group checks that all ranks make the same
//! calls, and finds ranks that are late or dead.
//!
//! ```text
//!   a call on a GPU tensor ─┬─▶ the GPU's queue ────────────────────────────────▶ the data, some time later
//!                           └─▶ ExternalCall ─▶ companion group: agree_on ──────▶ mismatch, late rank, lost rank: as for any call
//! ```
//! Not here: who moves the data, and what happens to it when the group is given up.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::ProcessGroup;
use crate::call::{Call, Op};
use crate::element::DType;
use crate::error::CommError;
use crate::monitor::GroupState;
use crate::process::Process;
use crate::reduce::ReduceOp;

/// A call that another library carries out: what the ranks compare, and where in the program it is made.
#[derive(Debug, Clone, Copy)]
pub struct ExternalCall(Call);

impl ExternalCall {
    /// A call on `count` elements of a type. Its call site is the caller of this function.
    #[track_caller]
    pub fn new(op: Op, dtype: DType, count: usize) -> Self {
        Self(Call::new(op).of(dtype, count))
    }

    /// Sets the reduction.
    #[must_use]
    pub fn reduce(self, op: ReduceOp) -> Self {
        Self(self.0.reduce(op))
    }

    /// Sets the root.
    #[must_use]
    pub fn root(self, root: usize) -> Self {
        Self(self.0.root(root))
    }

    /// Sets lengths that must be equal on all ranks.
    #[must_use]
    pub fn counts(self, counts: impl IntoIterator<Item = usize>) -> Self {
        Self(self.0.extra(counts))
    }
}

impl std::fmt::Display for ExternalCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}:{}", self.0, self.0.site.file(), self.0.site.line())
    }
}

impl ProcessGroup {
    /// A group of the same ranks with the name `<this group's>/<purpose>`, in which they [`agree_on`](Self::agree_on) calls.
    /// All ranks create it together, once for each purpose.
    #[track_caller]
    pub fn companion(&self, purpose: &str) -> Result<Self, CommError> {
        let all: Vec<usize> = (0..self.size()).collect();
        self.run(Call::new(Op::NewGroup).extra(all.iter().copied()), |tiers, cx| tiers.barrier(cx))?;
        self.form_child(&format!("{}/{purpose}", self.name()), &all)
    }

    /// Returns when all ranks have passed the same call as their next one here. If they differ, all of them get an error.
    ///
    /// ```
    /// use drumline_comm::{CommError, DType, ExternalCall, GroupOptions, LocalGroup, Op};
    ///
    /// let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
    ///     let gpu = group.companion("gpu")?;
    ///     gpu.agree_on(ExternalCall::new(Op::Broadcast, DType::F32, 10).root(0))?;
    ///     gpu.agree_on(ExternalCall::new(Op::Broadcast, DType::F32, 10 + group.rank()).root(0))
    /// });
    /// for outcome in outcomes {
    ///     assert!(matches!(outcome, Err(CommError::Mismatch { group, .. }) if group == "world/gpu"));
    /// }
    /// ```
    pub fn agree_on(&self, call: ExternalCall) -> Result<(), CommError> {
        self.run(call.0, |tiers, cx| tiers.barrier(cx))
    }

    /// As [`agree_on`](Self::agree_on), for a call in which each rank knows only its own counts: `sends[i]` elements go to rank
    /// `i`, `receives[i]` come from it. Counts that do not fit together are the same error as in
    /// [`all_to_all_uneven`](Self::all_to_all_uneven).
    pub fn agree_on_uneven(
        &self,
        call: ExternalCall,
        sends: &[usize],
        receives: &[usize],
    ) -> Result<(), CommError> {
        self.run(call.0, |tiers, cx| tiers.compare_cells(cx, sends, receives))
    }

    /// How long a call waits for a rank that makes no progress.
    pub fn timeout(&self) -> Duration {
        self.inner.process.options.timeout
    }

    /// The group's status, for threads that must not keep the group alive.
    pub fn status(&self) -> GroupStatus {
        let Self { inner, .. } = self;
        GroupStatus { process: inner.process.clone(), state: inner.state.clone() }
    }

    /// A value that another library keeps with the group, one for each type. It is made when it is first needed, and dropped
    /// with the group.
    pub fn attached<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut items = self.inner.attachments.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = items.iter().find_map(|item| item.clone().downcast::<T>().ok());
        known.unwrap_or_else(|| {
            let made = Arc::new(make());
            items.push(made.clone());
            made
        })
    }
}

/// Whether a group can still be used.
#[derive(Debug, Clone)]
pub struct GroupStatus {
    process: Arc<Process>,
    state: Arc<GroupState>,
}

impl GroupStatus {
    /// Why the group was given up, if it was.
    pub fn failure(&self) -> Option<CommError> {
        self.state.cause()
    }

    /// A rank that has left the group or the job normally, if there is one. Ranks are counted in the whole job.
    pub fn left(&self) -> Option<usize> {
        let index = self.state.left.iter().position(|left| left.load(Ordering::Acquire))?;
        Some(self.state.members[index])
    }

    /// Gives the group up with this cause, unless it was given up before, and reports it to the other ranks. Returns the cause
    /// that counts.
    #[cold]
    pub fn give_up(&self, cause: CommError) -> CommError {
        let (cause, is_ours) = self.state.give_up(cause);
        if is_ours {
            self.process.monitor.call_off(&self.state, &cause);
        }
        cause
    }

    /// As [`ProcessGroup::abort`].
    #[cold]
    pub fn abort(&self, cause: &str) -> CommError {
        let group = self.state.group.clone();
        let by = self.process.member.rank;
        self.process.member.abandon();
        self.give_up(CommError::CalledOff { group, by, cause: cause.into(), recoverable: false })
    }
}

/// See [`ProcessGroup::attached`].
#[derive(Default)]
pub(super) struct Attachments(Mutex<Vec<Arc<dyn Any + Send + Sync>>>);

impl std::fmt::Debug for Attachments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Attachments")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_group::LocalGroup;
    use crate::process::GroupOptions;

    #[test]
    fn attached_values_live_as_long_as_the_group() {
        let (first, held) = LocalGroup::run(1, |group| {
            let first = group.attached(|| 7u32);
            assert_eq!(*group.clone().attached(|| 8u32), 7);
            assert_eq!(*group.attached(|| "other"), "other");
            Ok((Arc::downgrade(&first), Arc::strong_count(&first)))
        })
        .unwrap()
        .remove(0);
        assert_eq!(held, 2);
        assert!(first.upgrade().is_none(), "dropped with the group");
    }

    #[test]
    fn giving_up_through_the_status_reaches_all_ranks() {
        let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| match group.rank() {
            0 => group.barrier(),
            _ => Err(group.status().abort("the GPU is gone")),
        });
        for outcome in outcomes {
            assert!(
                outcome.unwrap_err().to_string().contains("rank 1 called off group `world`: the GPU is gone")
            );
        }
    }

    #[test]
    fn the_status_names_a_rank_that_has_left() {
        let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
            let status = group.status();
            group.barrier()?;
            assert!(group.rank() == 1 || status.failure().is_none());
            if group.rank() == 0 {
                let deadline = std::time::Instant::now() + Duration::from_secs(10);
                while status.left().is_none() && std::time::Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                assert_eq!(status.left(), Some(1));
            }
            Ok(())
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }

    #[test]
    fn counts_that_do_not_fit_give_the_same_error_as_in_a_call_with_data() {
        let outcomes = |receives_of_1: [usize; 2], with_data: bool| {
            LocalGroup::outcomes(2, &GroupOptions::default(), move |group| {
                let gpu = group.companion("gpu")?;
                let (sends, receives) = match group.rank() {
                    0 => ([1, 3], [1, 2]),
                    _ => ([2, 4], receives_of_1),
                };
                if with_data {
                    let (input, mut output) =
                        (vec![0f32; sends.iter().sum()], vec![0f32; receives.iter().sum()]);
                    return gpu.all_to_all_uneven(&input, &sends, &mut output, &receives);
                }
                let call = ExternalCall::new(Op::AllToAll, DType::F32, 0).counts([2]);
                gpu.agree_on_uneven(call, &sends, &receives)?;
                gpu.agree_on(call)
            })
        };
        assert!(outcomes([3, 4], false).iter().all(Result::is_ok), "control: they fit");
        let text = |outcome: &Result<(), CommError>| {
            let error = outcome.as_ref().unwrap_err().to_string();
            // The two calls have different call sites.
            error.split(" at ").next().unwrap().to_owned() + error.rsplit(": ").next().unwrap()
        };
        for (external, with_data) in outcomes([5, 4], false).iter().zip(&outcomes([5, 4], true)) {
            assert_eq!(text(external), text(with_data));
            assert!(text(external).contains("it sends 3 elements to this rank, which expects 5"));
        }
    }

    #[test]
    fn ranks_that_announce_different_calls_are_both_named() {
        let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
            let gpu = group.companion("gpu")?;
            let op = if group.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
            let call = ExternalCall::new(Op::AllReduce, DType::Bf16, 5).reduce(op);
            assert!(call.to_string().starts_with("all_reduce(5 bf16, "));
            gpu.agree_on(call)
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains("all_reduce(5 bf16, sum) #1") && error.contains("all_reduce(5 bf16, max) #1"),
                "{error}"
            );
        }
    }
}
