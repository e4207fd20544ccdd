//! What this process does at a spawn call. The decision is pure; environment and parent are passed in.
//!
//! ```text
//!   no ticket, no RANK ─▶ Parent        no ticket, RANK ─▶ InPlace (a launcher's rank)
//!   ticket for this call ─▶ Worker      ticket for another call ─▶ PassesBy (or that call's error)
//! ```
//!
//! The *ticket* is a variable that names the call at which a rank runs its function. It is only valid in a child of the
//! process that wrote it, because processes that a rank starts inherit the variable as well.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::sync::OnceLock;

use drumline_rendezvous::worker_env;
use serde::{Deserialize, Serialize};

use super::call::{self, Call, Failed};
use super::error::LaunchedError;
use super::notes::{NotePad, Notes};
use super::{SpawnError, Worker};

/// What a rank needs to know besides the worker environment.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Ticket {
    parent: u32,
    call: Call,
    notes: RawFd,
    failed: Vec<Failed>,
}

/// What this process does at a call.
#[derive(Debug)]
pub(super) enum Role {
    /// It starts the ranks.
    Parent,
    /// It runs the function, and ends.
    Worker { worker: Worker, notes: NotePad },
    /// It skips the call, which the parent has completed before.
    PassesBy,
    /// It runs the function, and continues.
    InPlace(Worker),
}

/// The role without opened resources.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Parent,
    Worker { notes: RawFd },
    PassesBy,
    FailedBefore { error: String },
    InPlace,
    Nested,
}

/// The rank of this process, once it runs the function of its call.
static SPAWNED_RANK: OnceLock<usize> = OnceLock::new();

/// Whether this process is a rank that [`spawn`](crate::spawn) has started. Check it before something that should be
/// printed or written once, such as a greeting before the call.
///
/// ```
/// if !drumline::launch::is_spawned() {
///     println!("training on two ranks");
/// }
/// ```
pub fn is_spawned() -> bool {
    own_ticket().is_some()
}

/// The ticket for a rank of `call`, as the value of its variable.
pub(super) fn ticket(call: &Call, notes: &Notes) -> String {
    let (parent, notes) = (std::process::id(), notes.number());
    let ticket = Ticket { parent, call: call.clone(), notes, failed: call::failed() };
    serde_json::to_string(&ticket).expect("numbers and texts can always be written as JSON")
}

impl Role {
    pub(super) fn here(
        call: &Call,
        nproc: usize,
        asked: &[(OsString, OsString)],
    ) -> Result<Self, SpawnError> {
        let env = |name: &str| std::env::var_os(name);
        let has_rank = env(worker_env::RANK).is_some();
        let worker = || Worker::from_env(env).map_err(LaunchedError::from);
        match decide(own_ticket().as_ref(), call, SPAWNED_RANK.get().is_some(), has_rank) {
            Decision::Parent => Ok(Role::Parent),
            Decision::PassesBy => Ok(Role::PassesBy),
            Decision::FailedBefore { error } => Err(SpawnError::FailedBefore { error }),
            Decision::Nested => {
                Err(SpawnError::Nested { rank: SPAWNED_RANK.get().copied().unwrap_or_default() })
            }
            Decision::InPlace => {
                let worker = worker()?;
                check_launched(&worker, nproc, asked, env)?;
                Ok(Role::InPlace(worker))
            }
            Decision::Worker { notes } => {
                let (worker, notes) = (worker()?, NotePad::open(notes).map_err(SpawnError::Setup)?);
                notes.reached(worker.rank).map_err(SpawnError::Setup)?;
                // If another thread was first, it ends this process with its own result.
                let _ = SPAWNED_RANK.set(worker.rank);
                Ok(Role::Worker { worker, notes })
            }
        }
    }
}

fn own_ticket() -> Option<Ticket> {
    let text = std::env::var(worker_env::DRUMLINE_SPAWN).ok()?;
    let ticket: Ticket = serde_json::from_str(&text).ok()?;
    (ticket.parent == std::os::unix::process::parent_id()).then_some(ticket)
}

fn decide(ticket: Option<&Ticket>, call: &Call, is_worker: bool, has_rank: bool) -> Decision {
    let Some(ticket) = ticket else {
        return if has_rank { Decision::InPlace } else { Decision::Parent };
    };
    if is_worker {
        return Decision::Nested;
    }
    if ticket.call == *call {
        return Decision::Worker { notes: ticket.notes };
    }
    match ticket.failed.iter().find(|failed| failed.call == *call) {
        Some(failed) => Decision::FailedBefore { error: failed.error.clone() },
        None => Decision::PassesBy,
    }
}

/// Checks that a rank of a launcher can run as one of `nproc` ranks with these variables.
fn check_launched(
    worker: &Worker,
    nproc: usize,
    asked: &[(OsString, OsString)],
    env: impl Fn(&str) -> Option<OsString>,
) -> Result<(), LaunchedError> {
    let Worker { local_world_size, world_size, .. } = *worker;
    if nproc != local_world_size && nproc != world_size {
        return Err(LaunchedError::RankCount { local_world_size, world_size, nproc });
    }
    let is_set = |(name, value): &&(OsString, OsString)| name.to_str().and_then(&env).as_ref() == Some(value);
    match asked.iter().find(|asked| !is_set(asked)) {
        None => Ok(()),
        Some((name, value)) => Err(LaunchedError::Variable { name: name.clone(), value: value.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(text: &str) -> Call {
        serde_json::from_str(&format!(r#"{{"place": "{text}", "before": 0}}"#)).unwrap()
    }

    #[test]
    fn the_role_follows_from_ticket_and_rank() {
        let (ours, earlier, broken) = (call("b"), call("a"), call("x"));
        let failed = vec![Failed { call: broken.clone(), error: "no".to_owned() }];
        let ticket = Ticket { parent: 1, call: ours.clone(), notes: 7, failed };
        assert_eq!(decide(None, &ours, false, false), Decision::Parent);
        assert_eq!(decide(None, &ours, false, true), Decision::InPlace);
        assert_eq!(decide(Some(&ticket), &ours, false, true), Decision::Worker { notes: 7 });
        assert_eq!(decide(Some(&ticket), &earlier, false, true), Decision::PassesBy);
        let error = "no".to_owned();
        assert_eq!(decide(Some(&ticket), &broken, false, true), Decision::FailedBefore { error });
        assert_eq!(decide(Some(&ticket), &call("c"), true, true), Decision::Nested);
    }

    #[test]
    fn a_launchers_rank_must_match_the_number_of_ranks_and_the_variables() {
        let worker = Worker { rank: 5, world_size: 8, local_rank: 1, local_world_size: 4 };
        let env = |name: &str| (name == "SET").then(|| OsString::from("1"));
        let asked = |name: &str, value: &str| vec![(OsString::from(name), OsString::from(value))];
        assert_eq!(check_launched(&worker, 4, &[], env), Ok(()));
        assert_eq!(check_launched(&worker, 8, &asked("SET", "1"), env), Ok(()));
        assert!(
            check_launched(&worker, 2, &[], env)
                .unwrap_err()
                .to_string()
                .contains("try `--nproc-per-node 2`")
        );
        assert!(
            check_launched(&worker, 4, &asked("SET", "2"), env)
                .unwrap_err()
                .to_string()
                .contains("try SET=2 before")
        );
        assert!(check_launched(&worker, 4, &asked("UNSET", "2"), env).is_err());
    }
}
