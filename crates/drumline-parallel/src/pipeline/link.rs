//! Links: for each rank with a neighbouring stage, a thread that sends and one that receives, so that nobody who computes
//! waits for a message to leave.
//!
//! ```text
//!   rank 0   send ─▶ thread ══ group {0 → 1} ══▶ thread ─▶ receive   rank 1
//!            receive ◀─ thread ◀══ group {1 → 0} ══ thread ◀─ send
//! ```
//! A pair of ranks has a group for each direction. Its messages leave and arrive in the order of the program, which is the
//! same at both ends: the verifier has shown that ranks that wait for each message in this order never wait for one another,
//! and ranks that wait for fewer do not either. A message has the tag of (step, direction, stage, micro-batch).

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use drumline_comm::{CommError, ProcessGroup};
use drumline_plan::pipeline::{Message, Program, Way};
use tch::Device;

use super::parcel::Parcel;
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The links of a rank to its neighbours.
#[derive(Debug)]
pub struct Links {
    peers: HashMap<usize, Peer>,
    step: u64,
}

/// A rank with a neighbouring stage.
#[derive(Debug)]
struct Peer {
    sending: Outgoing,
    receiving: Incoming,
}

#[derive(Debug)]
struct Outgoing {
    group: ProcessGroup,
    jobs: Option<Sender<(u64, Parcel)>>,
    state: Arc<Mutex<Sent>>,
    thread: Option<JoinHandle<()>>,
}

/// What a sending thread has done.
#[derive(Debug, Default)]
struct Sent {
    failure: Option<String>,
    error: Option<ParallelError>,
}

#[derive(Debug)]
struct Incoming {
    group: ProcessGroup,
    jobs: Option<Sender<(u64, Device)>>,
    arrivals: Receiver<Result<Parcel>>,
    /// Messages in the order in which they are expected, and those that have arrived before they were asked for.
    expected: std::collections::VecDeque<Message>,
    arrived: HashMap<Message, Parcel>,
    thread: Option<JoinHandle<()>>,
}

/// The tag of a message.
fn tag(step: u64, message: Message) -> u64 {
    let way = u64::from(message.way == Way::Backward);
    (step % 2) << 63 | way << 62 | (message.stage as u64) << 32 | message.micro_batch as u64
}

impl Links {
    /// The links that a program needs. All ranks of the group call it.
    #[track_caller]
    pub fn new(group: &ProcessGroup, program: &Program) -> Result<Self> {
        let mut directed: HashMap<[usize; 2], ProcessGroup> = HashMap::new();
        for [first, second] in program.pairs() {
            for pair in [[first, second], [second, first]] {
                directed.extend(group.new_group(&pair)?.map(|made| (pair, made)));
            }
        }
        let me = group.rank();
        let mut peers = HashMap::new();
        for [first, second] in program.pairs() {
            let Some(peer) =
                [(first, second), (second, first)].iter().find(|(own, _)| *own == me).map(|(_, peer)| *peer)
            else {
                continue;
            };
            let (Some(to), Some(from)) = (directed.remove(&[me, peer]), directed.remove(&[peer, me])) else {
                return Err(ParallelError::Internal { what: "a link has no group" });
            };
            peers.insert(peer, Peer { sending: Outgoing::new(to)?, receiving: Incoming::new(from)? });
        }
        Ok(Self { peers, step: 0 })
    }

    /// Begins a step: its messages are not those of the step before.
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    fn peer(&mut self, rank: usize) -> Result<&mut Peer> {
        self.peers
            .get_mut(&rank)
            .ok_or(ParallelError::Internal { what: "a message to a rank without a link" })
    }

    /// Sends a message to a rank, without waiting.
    pub fn send(&mut self, message: Message, to: usize, parcel: Parcel) -> Result {
        let tag = tag(self.step, message);
        let sending = &mut self.peer(to)?.sending;
        sending.check()?;
        let sent = sending.jobs.as_ref().is_some_and(|jobs| jobs.send((tag, parcel)).is_ok());
        if sent { Ok(()) } else { Err(ended()) }
    }

    /// Lets a message of a rank arrive, on `device`.
    pub fn expect(&mut self, message: Message, from: usize, device: Device) -> Result {
        let tag = tag(self.step, message);
        let receiving = &mut self.peer(from)?.receiving;
        receiving.expected.push_back(message);
        let sent = receiving.jobs.as_ref().is_some_and(|jobs| jobs.send((tag, device)).is_ok());
        if sent { Ok(()) } else { Err(receiving.failure()) }
    }

    /// Waits for an expected message.
    pub fn receive(&mut self, message: Message, from: usize) -> Result<Parcel> {
        let receiving = &mut self.peer(from)?.receiving;
        loop {
            if let Some(parcel) = receiving.arrived.remove(&message) {
                return Ok(parcel);
            }
            let arrival = receiving.arrivals.recv().map_err(|_| ended())??;
            let arrived = receiving.expected.pop_front().ok_or_else(ended)?;
            receiving.arrived.insert(arrived, arrival);
        }
    }

    /// The error of a message that could not be sent, if there is one.
    pub fn check(&self) -> Result {
        self.peers.values().try_for_each(|peer| peer.sending.check())
    }

    /// Ends all links: this rank will not continue.
    pub fn abort(&self, cause: &str) {
        for peer in self.peers.values() {
            let _: [CommError; 2] =
                [&peer.sending.group, &peer.receiving.group].map(|group| group.abort(cause));
        }
    }
}

fn ended() -> ParallelError {
    ParallelError::Internal { what: "a thread of a link has ended" }
}

fn started(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let what = "a thread that sends or receives activations";
    let thread = std::thread::Builder::new().name(name.into()).spawn(run);
    thread.map_err(|cause| ParallelError::Thread { what, cause })
}

impl Outgoing {
    fn new(group: ProcessGroup) -> Result<Self> {
        let (jobs, work) = channel::<(u64, Parcel)>();
        let state = Arc::new(Mutex::new(Sent::default()));
        let run = {
            let (group, state) = (group.clone(), state.clone());
            move || {
                let _no_grad = tch::no_grad_guard();
                for (tag, parcel) in work {
                    // After an error messages are dropped: the group has ended.
                    let mut sent = Ok(());
                    if lock(&state).failure.is_none() {
                        let send = || parcel.send(&group, 1, tag);
                        let panicked = |_| {
                            Err(ParallelError::Internal { what: "a thread that sends messages panicked" })
                        };
                        sent = catch_unwind(AssertUnwindSafe(send)).unwrap_or_else(panicked);
                    }
                    drop(parcel);
                    if let Err(error) = sent {
                        group.abort(&error.to_string());
                        let mut state = lock(&state);
                        (state.failure, state.error) = (Some(error.to_string()), Some(error));
                    }
                }
            }
        };
        let thread = Some(started("pipe-send", run)?);
        Ok(Self { group, jobs: Some(jobs), state, thread })
    }

    fn check(&self) -> Result {
        let mut state = lock(&self.state);
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        let ended = |cause: &String| Err(super::PipelineError::Ended { cause: cause.clone() }.into());
        state.failure.as_ref().map_or(Ok(()), ended)
    }
}

fn lock(state: &Mutex<Sent>) -> std::sync::MutexGuard<'_, Sent> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Incoming {
    fn new(group: ProcessGroup) -> Result<Self> {
        let ((jobs, work), (results, arrivals)) = (channel::<(u64, Device)>(), channel());
        let run = {
            let group = group.clone();
            move || {
                let _no_grad = tch::no_grad_guard();
                for (tag, device) in work {
                    let received = Parcel::receive(&group, 0, tag, device);
                    let has_failed = received.is_err();
                    if results.send(received).is_err() || has_failed {
                        break;
                    }
                }
            }
        };
        let thread = Some(started("pipe-recv", run)?);
        let (expected, arrived) = Default::default();
        Ok(Self { group, jobs: Some(jobs), arrivals, expected, arrived, thread })
    }
}

impl Incoming {
    /// The error with which the thread has ended.
    fn failure(&self) -> ParallelError {
        self.arrivals.iter().find_map(|arrival| arrival.err()).unwrap_or_else(ended)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let is_waiting = |peer: &Peer| !peer.receiving.expected.is_empty();
        if std::thread::panicking() || self.peers.values().any(is_waiting) {
            self.abort("a pipeline ended in the middle of a step");
        }
        for peer in self.peers.values_mut() {
            (peer.sending.jobs, peer.receiving.jobs) = (None, None);
        }
        for thread in
            self.peers.values_mut().flat_map(|peer| [&mut peer.sending.thread, &mut peer.receiving.thread])
        {
            if let Some(thread) = thread.take() {
                // It has returned its errors already.
                let _ = thread.join();
            }
        }
    }
}
