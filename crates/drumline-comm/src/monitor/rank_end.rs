//! How ranks end, and how errors describe it.

use std::sync::atomic::Ordering;

use super::group_state::GroupState;
use crate::error::CommError;

#[derive(Debug, Clone)]
pub(super) enum RankEnd {
    /// It left normally.
    Left,
    Lost {
        host: String,
        pid: u32,
        how: String,
    },
}

impl RankEnd {
    /// Records the end of `rank` in the group's state, if it is a member.
    pub(super) fn apply(&self, state: &GroupState, rank: usize) {
        let Some(index) = state.members.iter().position(|&member| member == rank) else { return };
        match self {
            RankEnd::Left => state.left[index].store(true, Ordering::Release),
            RankEnd::Lost { host, pid, how } => {
                let (host, how) = (host.clone(), how.clone());
                state.give_up(CommError::PeerLost { group: state.group.clone(), rank, host, pid: *pid, how });
            }
        }
    }
}

/// How a rank ended whose connection was lost, if nobody (such as a launcher) has reported the end of its process.
pub(super) fn silent_end(host: &str) -> String {
    format!("its connection ended and nobody reported why; {}", advice(host))
}

/// How the rank ended that hosts the store, if the store cannot be reached.
pub(super) fn store_end(host: &str, error: &str) -> String {
    format!("the store it hosts no longer answers ({error}); {}", advice(host))
}

fn advice(host: &str) -> String {
    format!("try looking at what it last wrote on {host} (its stderr or log)")
}

/// How a process ended whose exit status is known.
pub(super) fn exit_text(code: Option<i32>, signal: Option<i32>) -> String {
    match (code, signal) {
        (_, Some(signal)) => format!("killed by signal {signal}{}", signal_name(signal)),
        (Some(code), None) => format!("exited with code {code} without leaving the group"),
        (None, None) => "it panicked".into(),
    }
}

fn signal_name(signal: i32) -> String {
    let Some(signal) = rustix::process::Signal::from_named_raw(signal) else { return String::new() };
    let text = format!("{signal:?}");
    let name = text.trim_matches('"').trim_start_matches("Signal::");
    let name = name.replace("ABORT", "ABRT").replace("ALARM", "ALRM").replace("CHILD", "CHLD");
    format!(" (SIG{name})")
}
