//! Calls whose data takes a way of its own, such as from GPU to GPU: the group does not move it, but sees to it that all ranks make the
//! same calls, and knows of ranks that are late or gone.
//!
//! ```text
//!   a call on a GPU's tensor ─┬─▶ the GPU's queue ────────────────────────▶ data, whenever it comes to it
//!                             └─▶ Announced ─▶ companion group: meet ─────▶ mismatch, late rank, lost rank: as for any call
//! ```
//! Not here: who moves the data, and what becomes of it when the group is given up.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::ProcessGroup;
use crate::call::{Call, Op};
use crate::element::DType;
use crate::error::CommError;
use crate::monitor::Fate;
use crate::process::Process;
use crate::reduce::ReduceOp;

/// A call that is carried out elsewhere: what ranks compare, and where in the program it was made.
#[derive(Debug, Clone, Copy)]
pub struct Announced(Call);

impl Announced {
    /// A call on so many elements of a type, made where this is called.
    #[track_caller]
    pub fn new(op: Op, dtype: DType, count: usize) -> Self {
        Self(Call::new(op).of(dtype, count))
    }

    /// How it reduces.
    #[must_use]
    pub fn reduce(self, op: ReduceOp) -> Self {
        Self(self.0.reduce(op))
    }

    /// Its root.
    #[must_use]
    pub fn root(self, root: usize) -> Self {
        Self(self.0.root(root))
    }

    /// Lengths that must agree.
    #[must_use]
    pub fn counts(self, counts: impl IntoIterator<Item = usize>) -> Self {
        Self(self.0.extra(counts))
    }
}

impl std::fmt::Display for Announced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}:{}", self.0, self.0.site.file(), self.0.site.line())
    }
}

impl ProcessGroup {
    /// A group of the same ranks under the name `<this group's>/<purpose>`, in which they [`meet`](Self::meet). Made by all of them together, once
    /// for each purpose.
    #[track_caller]
    pub fn companion(&self, purpose: &str) -> Result<Self, CommError> {
        let all: Vec<usize> = (0..self.size()).collect();
        self.run(Call::new(Op::NewGroup).extra(all.iter().copied()), |tiers, cx| tiers.barrier(cx))?;
        self.form_child(&format!("{}/{purpose}", self.name()), &all)
    }

    /// Returns when all ranks have announced the same call as their next one here; an error on all of them if they differ.
    ///
    /// ```
    /// use drumline_comm::{Announced, CommError, DType, GroupOptions, LocalGroup, Op};
    ///
    /// let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
    ///     let gpu = group.companion("gpu")?;
    ///     gpu.meet(Announced::new(Op::Broadcast, DType::F32, 10).root(0))?;
    ///     gpu.meet(Announced::new(Op::Broadcast, DType::F32, 10 + group.rank()).root(0))
    /// });
    /// for outcome in outcomes {
    ///     assert!(matches!(outcome, Err(CommError::Mismatch { group, .. }) if group == "world/gpu"));
    /// }
    /// ```
    pub fn meet(&self, call: Announced) -> Result<(), CommError> {
        self.run(call.0, |tiers, cx| tiers.barrier(cx))
    }

    /// As [`meet`](Self::meet), for a call in which each rank knows only its own lengths: `sends[i]` elements go to rank `i`, `receives[i]` come from
    /// it. Lists that do not fit together are told as [`all_to_all_uneven`](Self::all_to_all_uneven) tells them.
    pub fn meet_in_parts(
        &self,
        call: Announced,
        sends: &[usize],
        receives: &[usize],
    ) -> Result<(), CommError> {
        self.run(call.0, |tiers, cx| tiers.compare_cells(cx, sends, receives))
    }

    /// How long a call waits for a rank that makes no progress.
    pub fn timeout(&self) -> Duration {
        self.inner.process.options.timeout
    }

    /// Whether the group can still be used, for threads that must not keep it alive.
    pub fn standing(&self) -> Standing {
        let Self { inner, .. } = self;
        Standing { process: inner.process.clone(), fate: inner.fate.clone() }
    }

    /// What another library keeps with the group, one for each type: made when it is first asked for, dropped with the group.
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
pub struct Standing {
    process: Arc<Process>,
    fate: Arc<Fate>,
}

impl Standing {
    /// Why the group was given up, if it was.
    pub fn failure(&self) -> Option<CommError> {
        self.fate.cause()
    }

    /// A rank, as the job counts them, that has let go of the group or left the job in good order, if one has.
    pub fn left(&self) -> Option<usize> {
        let index = self.fate.left.iter().position(|left| left.load(Ordering::Acquire))?;
        Some(self.fate.members[index])
    }

    /// Gives the group up with this cause, unless there was one before, and tells the other ranks; returns the one that holds.
    #[cold]
    pub fn give_up(&self, cause: CommError) -> CommError {
        let (cause, is_ours) = self.fate.give_up(cause);
        if is_ours {
            self.process.monitor.call_off(&self.fate, &cause);
        }
        cause
    }

    /// As [`ProcessGroup::abort`].
    #[cold]
    pub fn abort(&self, cause: &str) -> CommError {
        let (group, by) = (self.fate.group.clone(), self.process.member.rank);
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
    fn what_is_attached_lives_as_long_as_the_group() {
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
    fn giving_up_by_way_of_the_standing_reaches_all_ranks() {
        let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| match group.rank() {
            0 => group.barrier(),
            _ => Err(group.standing().abort("the GPU is gone")),
        });
        for outcome in outcomes {
            assert!(
                outcome.unwrap_err().to_string().contains("rank 1 called off group `world`: the GPU is gone")
            );
        }
    }

    #[test]
    fn who_has_left_is_known() {
        let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
            let standing = group.standing();
            group.barrier()?;
            assert!(group.rank() == 1 || standing.failure().is_none());
            if group.rank() == 0 {
                let deadline = std::time::Instant::now() + Duration::from_secs(10);
                while standing.left().is_none() && std::time::Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                assert_eq!(standing.left(), Some(1));
            }
            Ok(())
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }

    #[test]
    fn parts_that_do_not_fit_are_told_as_in_a_call_with_data() {
        let told = |receives_of_1: [usize; 2], with_data: bool| {
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
                let call = Announced::new(Op::AllToAll, DType::F32, 0).counts([2]);
                gpu.meet_in_parts(call, &sends, &receives)?;
                gpu.meet(call)
            })
        };
        assert!(told([3, 4], false).iter().all(Result::is_ok), "control: they fit");
        let words = |outcome: &Result<(), CommError>| {
            let told = outcome.as_ref().unwrap_err().to_string();
            // Where the call was made is another place.
            told.split(" at ").next().unwrap().to_owned() + told.rsplit(": ").next().unwrap()
        };
        for (beside, with_data) in told([5, 4], false).iter().zip(&told([5, 4], true)) {
            assert_eq!(words(beside), words(with_data));
            assert!(words(beside).contains("it sends 3 elements to this rank, which expects 5"));
        }
    }

    #[test]
    fn ranks_that_announce_different_calls_are_both_named() {
        let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
            let gpu = group.companion("gpu")?;
            let op = if group.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
            let call = Announced::new(Op::AllReduce, DType::Bf16, 5).reduce(op);
            assert!(call.to_string().starts_with("all_reduce(5 bf16, "));
            gpu.meet(call)
        });
        for outcome in outcomes {
            let told = outcome.unwrap_err().to_string();
            assert!(
                told.contains("all_reduce(5 bf16, sum) #1") && told.contains("all_reduce(5 bf16, max) #1"),
                "{told}"
            );
        }
    }
}
