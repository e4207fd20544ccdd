//! Watches the processes of the ranks on this machine, so that every death is noticed.
//!
//! A rank's end usually shows as the end of its connections. But a child that it has forked, without executing another
//! program, holds copies of them and keeps them open, so this module watches the process itself. It posts what it sees to the
//! job's log. If the rank left normally, its own event is in the log before that.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use drumline_rendezvous::events::Event;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Shared, lock};

/// How long others, who know more, have to report a death first.
const HEAD_START: Duration = Duration::from_millis(400);

/// Added for each rank that may report the same death before this one.
const TURN: Duration = Duration::from_millis(40);

/// Another rank on this machine.
#[derive(Debug)]
pub(crate) struct Neighbour {
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) hosts_store: bool,
}

/// Reports the ends of these processes until the other end of the pipe `stop` is closed.
pub(super) fn watch(shared: &Arc<Shared>, neighbours: Vec<Neighbour>, stop: &OwnedFd) {
    let head_start = HEAD_START + TURN * shared.rank.min(10) as u32;
    let (mut watched, mut ended) = (Vec::new(), Vec::new());
    for neighbour in neighbours {
        match opened(neighbour.pid) {
            Ok(fd) => watched.push((fd, neighbour)),
            // It has ended before this thread could watch it.
            Err(Errno::SRCH) => ended.push(neighbour),
            Err(error) => {
                tracing::debug!(rank = neighbour.rank, %error, "cannot watch the process of a rank")
            }
        }
    }
    if !ended.is_empty() && is_stopped_within(stop, head_start) {
        return;
    }
    ended.into_iter().for_each(|neighbour| report(shared, neighbour));
    while !watched.is_empty() {
        let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(watched.iter().map(|(fd, _)| PollFd::new(fd, PollFlags::IN)));
        if poll(&mut fds, None).is_err() {
            continue;
        }
        let has_ended: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if has_ended[0] || is_stopped_within(stop, head_start) {
            return;
        }
        let mut has_ended = has_ended[1..].iter();
        for (_, neighbour) in watched.extract_if(.., |_| has_ended.next().is_some_and(|ended| *ended)) {
            report(shared, neighbour);
        }
    }
}

fn opened(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
    pidfd_open(pid, PidfdFlags::empty())
}

/// Whether the watch is stopped before this time has passed.
fn is_stopped_within(stop: &OwnedFd, time: Duration) -> bool {
    let nap = rustix::fs::Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as _ };
    let mut fds = [PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
    matches!(poll(&mut fds, Some(&nap)), Ok(ready) if ready > 0)
}

fn report(shared: &Arc<Shared>, neighbour: Neighbour) {
    let Neighbour { rank, host, pid, hosts_store } = neighbour;
    if lock(&shared.gone).contains_key(&rank) {
        return;
    }
    if hosts_store {
        return shared.lost_store("its process has ended");
    }
    shared.post(&Event::Lost { rank, host, pid });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_differs_from_one_that_cannot_be_watched() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        opened(child.id()).unwrap();
        child.wait().unwrap();
        assert_eq!(opened(child.id()).unwrap_err(), Errno::SRCH);
        assert_eq!(opened(0).unwrap_err(), Errno::INVAL);
    }
}
