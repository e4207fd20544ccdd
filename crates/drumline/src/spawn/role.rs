//! What this process is at a spawn call. The decision is pure; environment and parent come in from outside.
//!
//! ```text
//!   no ticket, no RANK ─▶ Parent        no ticket, RANK ─▶ InPlace (a launcher's rank)
//!   ticket for this call ─▶ Worker      ticket for another call ─▶ PassesBy (or that call's error)
//! ```
//!
//! The *ticket* is a variable that names the call a rank is to come to. It counts only in a child of the process that wrote
//! it: what a rank starts itself inherits the variable too.

use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::sync::OnceLock;

use drumline_rendezvous::worker_env;
use serde::{Deserialize, Serialize};

use super::call::{self, Call, Failed};
use super::notes::{NotePad, Notes};
use super::{SpawnError, Worker};

/// What a rank must know besides the worker environment.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Ticket {
    parent: u32,
    call: Call,
    notes: RawFd,
    failed: Vec<Failed>,
}

/// What this process is to do at a call.
#[derive(Debug)]
pub(super) enum Role {
    /// Start the ranks.
    Parent,
    /// Run the function and end.
    Worker { worker: Worker, notes: NotePad },
    /// Go on: the call has been carried out by the parent before.
    PassesBy,
    /// Run the function and go on.
    InPlace(Worker),
}

/// The same without anything that must be opened.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Parent,
    Worker { notes: RawFd },
    PassesBy,
    FailedBefore { error: String },
    InPlace,
    Nested,
}

/// Set once, when this process has become the rank of its call.
static BECAME: OnceLock<usize> = OnceLock::new();

/// Whether this process is a rank that [`spawn`](crate::spawn) has started: what is to be said or written once, such as a
/// greeting before the call, is not its task.
///
/// ```
/// if !drumline::is_spawned() {
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
        let worker = || Worker::from_env(env).map_err(|why| SpawnError::Launched { why });
        match decide(own_ticket().as_ref(), call, BECAME.get().is_some(), has_rank) {
            Decision::Parent => Ok(Role::Parent),
            Decision::PassesBy => Ok(Role::PassesBy),
            Decision::FailedBefore { error } => Err(SpawnError::FailedBefore { error }),
            Decision::Nested => Err(SpawnError::Nested { rank: BECAME.get().copied().unwrap_or_default() }),
            Decision::InPlace => {
                let worker = worker()?;
                fits(&worker, nproc, asked, env).map_err(|why| SpawnError::Launched { why })?;
                Ok(Role::InPlace(worker))
            }
            Decision::Worker { notes } => {
                let (worker, notes) = (worker()?, NotePad::open(notes).map_err(SpawnError::Setup)?);
                notes.reached(worker.rank).map_err(SpawnError::Setup)?;
                // Another thread that came here first would have ended this process with its verdict.
                let _ = BECAME.set(worker.rank);
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

fn decide(ticket: Option<&Ticket>, call: &Call, became_a_worker: bool, has_rank: bool) -> Decision {
    let Some(ticket) = ticket else {
        return if has_rank { Decision::InPlace } else { Decision::Parent };
    };
    if became_a_worker {
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

/// Whether a launcher's rank can stand in for one of `nproc` ranks with these variables.
fn fits(
    worker: &Worker,
    nproc: usize,
    asked: &[(OsString, OsString)],
    env: impl Fn(&str) -> Option<OsString>,
) -> Result<(), String> {
    let Worker { local_world_size, world_size, .. } = *worker;
    if nproc != local_world_size && nproc != world_size {
        return Err(format!(
            "it has {local_world_size} ranks on this node ({world_size} in all) and spawn was called for {nproc}; try \
             `--nproc-per-node {nproc}`, or start the program without the launcher"
        ));
    }
    let is_set = |(name, value): &&(OsString, OsString)| name.to_str().and_then(&env).as_ref() == Some(value);
    match asked.iter().find(|asked| !is_set(asked)) {
        None => Ok(()),
        Some((name, value)) => Err(format!(
            "spawn was called with {0}={1}, which cannot be set any more; try {0}={1} before the launcher",
            name.display(),
            OsStr::display(value)
        )),
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
    fn a_launchers_rank_stands_in_where_numbers_and_variables_fit() {
        let worker = Worker { rank: 5, world_size: 8, local_rank: 1, local_world_size: 4 };
        let env = |name: &str| (name == "SET").then(|| OsString::from("1"));
        let asked = |name: &str, value: &str| vec![(OsString::from(name), OsString::from(value))];
        assert_eq!(fits(&worker, 4, &[], env), Ok(()));
        assert_eq!(fits(&worker, 8, &asked("SET", "1"), env), Ok(()));
        assert!(fits(&worker, 2, &[], env).unwrap_err().contains("try `--nproc-per-node 2`"));
        assert!(fits(&worker, 4, &asked("SET", "2"), env).unwrap_err().contains("try SET=2 before"));
        assert!(fits(&worker, 4, &asked("UNSET", "2"), env).is_err());
    }
}
