//! Ranks as threads of the test, over either transport, and never for longer than a limit.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use drumline_comm::{CommError, GroupOptions, LocalGroup, ProcessGroup, Transport};

pub(crate) type Result<T = ()> = std::result::Result<T, CommError>;

/// The two transports between ranks of one machine.
pub(crate) const BOTH: [Transport; 2] = [Transport::Shm, Transport::Tcp];

/// No test with threads takes this long, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(90);

/// Runs `body` on every rank and returns what they return; fails if one fails.
pub(crate) fn run<R: Send + 'static>(
    ranks: usize,
    transport: Transport,
    body: impl Fn(&ProcessGroup) -> Result<R> + Send + Sync + 'static,
) -> Vec<R> {
    let outcomes = outcomes(ranks, transport, Duration::from_secs(30), body);
    let errors: Vec<_> =
        outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).map(ToString::to_string).collect();
    assert!(errors.is_empty(), "{ranks} ranks over {transport:?}:\n{}", errors.join("\n"));
    outcomes.into_iter().flatten().collect()
}

/// Runs `body` on every rank, whose calls wait at most `timeout`, and returns each rank's own outcome.
pub(crate) fn outcomes<R: Send + 'static>(
    ranks: usize,
    transport: Transport,
    timeout: Duration,
    body: impl Fn(&ProcessGroup) -> Result<R> + Send + Sync + 'static,
) -> Vec<Result<R>> {
    let options = GroupOptions { transport, timeout, ..GroupOptions::default() };
    within(LIMIT, move || LocalGroup::outcomes(ranks, &options, |group| body(&group)))
}

/// What `act` returns; fails if that takes longer than `limit`.
#[track_caller]
pub(crate) fn within<R: Send + 'static>(limit: Duration, act: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || drop(sender.send(act())));
    match receiver.recv_timeout(limit) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("hangs: not done after {limit:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a thread that ends without a panic has sent its result"),
        },
    }
}
