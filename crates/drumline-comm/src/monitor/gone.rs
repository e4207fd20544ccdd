//! How ranks end, and what is said of it.

use std::sync::atomic::Ordering;

use super::fate::Fate;
use crate::error::CommError;

#[derive(Debug, Clone)]
pub(super) enum Gone {
    /// In good order.
    Left,
    Lost {
        host: String,
        pid: u32,
        how: String,
    },
}

impl Gone {
    /// What a group is to know of the end of `rank`, if that is one of its members.
    pub(super) fn tell(&self, fate: &Fate, rank: usize) {
        let Some(index) = fate.members.iter().position(|&member| member == rank) else { return };
        match self {
            Gone::Left => fate.left[index].store(true, Ordering::Release),
            Gone::Lost { host, pid, how } => {
                let (host, how) = (host.clone(), how.clone());
                fate.give_up(CommError::PeerLost { group: fate.group.clone(), rank, host, pid: *pid, how });
            }
        }
    }
}

/// Of a rank whose connection ended while nobody, such as a launcher, has told how its process ended.
pub(super) fn silent_end(host: &str) -> String {
    format!("its connection ended and nobody told why; {}", advice(host))
}

/// Of the rank whose process hosts the store, which cannot be reached.
pub(super) fn store_end(host: &str, error: &str) -> String {
    format!("the store it hosts no longer answers ({error}); {}", advice(host))
}

fn advice(host: &str) -> String {
    format!("try looking at what it last wrote on {host} (its stderr or log)")
}

/// Of a process that somebody saw end.
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
