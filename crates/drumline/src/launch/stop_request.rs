//! Signals as a request to save a checkpoint at the next step boundary, and then to stop.
//!
//! ```text
//!   SIGTERM, SIGUSR1, SIGINT ─▶ a flag of this process ─▶ is_requested     this rank alone
//!                                                      └▶ agreed(&group)   all ranks, the same answer at the same step
//! ```
//!
//! Launchers, Slurm before it preempts a job, and Ctrl-C all send signals, which rarely reach all ranks between the
//! same two steps. A rank that stopped because of its own signal would leave the others in a collective without it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::{CommError, ProcessGroup, ReduceOp};
use drumline_launch::{Signal, signal_name};
use signal_hook::flag;

/// The default signals: of launchers and Slurm's end of time, of Slurm's `--signal=USR1`, and of Ctrl-C.
const DEFAULT: [Signal; 3] = [Signal::TERM, Signal::USR1, Signal::INT];

/// Listens for a request to stop. Clones share what they have received.
///
/// From [`listen`](Self::listen) to the end of the process these signals have no other effect, except that a second
/// SIGINT ends the process at once.
///
/// ```
/// use drumline::StopRequest;
/// use drumline::comm::LocalGroup;
///
/// let stop = StopRequest::listen()?;
/// LocalGroup::run(2, |group| {
///     for step in 0..3 {
///         // … forward, backward, optimizer …
///         if stop.agreed(&group)? {
///             println!("checkpoint after step {step}");
///             break;
///         }
///     }
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct StopRequest {
    /// The number of the last signal received; 0 if there was none.
    received: Arc<AtomicUsize>,
}

impl StopRequest {
    /// Listens for SIGTERM, SIGUSR1 and SIGINT. All calls in a process return the same object, with the requests
    /// received before.
    pub fn listen() -> io::Result<Self> {
        static LISTENING: Mutex<Option<StopRequest>> = Mutex::new(None);
        let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stop) = &*listening {
            return Ok(stop.clone());
        }
        let stop = Self::listen_for(&DEFAULT)?;
        Ok(listening.insert(stop).clone())
    }

    /// Listens for these signals only. Returns an error for a signal that cannot be handled, such as SIGKILL.
    pub fn listen_for(signals: &[Signal]) -> io::Result<Self> {
        if let Some(signal) = signals.iter().find(|signal| !can_listen_for(**signal)) {
            let what =
                format!("{} cannot be listened for; try SIGTERM or SIGUSR1", signal_name(signal.as_raw()));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let received = Arc::new(AtomicUsize::new(0));
        for signal in signals {
            let number = signal.as_raw();
            if *signal == Signal::INT {
                // In this order, so that the first SIGINT only arms the default action for the second.
                let interrupted = Arc::new(AtomicBool::new(false));
                flag::register_conditional_default(number, Arc::clone(&interrupted))?;
                flag::register(number, interrupted)?;
            }
            flag::register_usize(number, Arc::clone(&received), number as usize)?;
        }
        Ok(Self { received })
    }

    /// Whether this process has been asked to stop.
    pub fn is_requested(&self) -> bool {
        self.signal().is_some()
    }

    /// The last signal that asked for it.
    pub fn signal(&self) -> Option<Signal> {
        Signal::from_named_raw(self.received.load(Ordering::Relaxed) as i32)
    }

    /// Whether any rank of `group` has been asked to stop, with the same answer on all of them: one small all-reduce.
    /// Every rank must call it at the same step.
    #[track_caller]
    pub fn agreed(&self, group: &ProcessGroup) -> Result<bool, CommError> {
        let mut anyone = [u8::from(self.is_requested())];
        group.all_reduce(&mut anyone, ReduceOp::Max)?;
        Ok(anyone[0] != 0)
    }
}

/// Excludes signals that the kernel does not deliver, and those that report a bug in this process.
fn can_listen_for(signal: Signal) -> bool {
    let never = [Signal::KILL, Signal::STOP, Signal::SEGV, Signal::ILL, Signal::FPE, Signal::BUS];
    !never.contains(&signal)
}
