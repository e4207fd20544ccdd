//! Nobody waits forever, whatever the rule by which messages pass.
//!
//! ```text
//!   mailbox      a send never waits, a receive waits for its message, in any order       shared memory, TCP
//!   rendezvous   a send waits until the other rank is at the receive                     MPI's synchronous send
//!   fifo         nobody waits for a message until its tensor is used, but the messages   NCCL, with one communicator
//!                of two ranks, of both directions, pass in the order in which they list them
//! ```
//! The ranks of a program are played on a board without times: each does what it can, until all are done or none can continue.
//! The result does not depend on who goes first, since no action ever takes away what another rank waits for.

use std::collections::VecDeque;
use std::fmt;

use super::super::action::{Action, Message};
use super::super::program::{Place, Program};

/// By which rule messages pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageRule {
    /// A send never waits; a receive waits for its message, and messages may arrive in any order.
    Mailbox,
    /// A send waits until the other rank is at the receive of the same message.
    Rendezvous,
    /// Messages of two ranks pass in the order in which both list them. Only who uses one waits for it.
    Fifo,
}

/// A rank that cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// What it waits at.
    pub place: Place,
    /// The rank for which it waits.
    pub on: usize,
    /// What this rank does not reach.
    pub awaited: Action,
}

/// Ranks that cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}, with messages by the rule {rule}: {}; try the program without its messages, which are then listed in an order that works",
    if *is_circle { "ranks wait for one another" } else { "a rank waits forever" }, Waits(waits)
)]
pub struct Deadlock {
    /// The rule by which messages pass.
    pub rule: MessageRule,
    /// The ranks that wait, each for the next one.
    pub waits: Vec<Wait>,
    /// Whether the last one waits for the first one; otherwise for a rank that has ended.
    pub is_circle: bool,
}

/// As many waits of a circle as one reads.
const SHOWN: usize = 8;

struct Waits<'a>(&'a [Wait]);

impl MessageRule {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Mailbox, Self::Rendezvous, Self::Fifo];
}

/// Messages that a rank has listed and that have not passed, by peer.
type Queue = (usize, VecDeque<Place>);

struct Board<'a> {
    program: &'a Program,
    rule: MessageRule,
    next: Vec<usize>,
    /// Messages that have passed, or with a mailbox have been sent: by direction, stage and micro-batch of the receiver.
    passed: [Vec<bool>; 2],
    queues: Vec<Vec<Queue>>,
    /// Ranks that may be able to continue.
    awake: Vec<usize>,
}

/// Whether all ranks reach the end of their rows.
///
/// The program's actions must be in their places ([`Program::check_placed`]).
pub fn progress(program: &Program, rule: MessageRule) -> Result<(), Deadlock> {
    let ranks = program.rows.len();
    let none = vec![false; program.stages.num_stages() * program.num_micro_batches];
    let mut board = Board {
        program,
        rule,
        next: vec![0; ranks],
        passed: [none.clone(), none],
        queues: vec![Vec::new(); ranks],
        awake: (0..ranks).rev().collect(),
    };
    while let Some(rank) = board.awake.pop() {
        while let Some(&action) = program.rows[rank].get(board.next[rank])
            && board.act(rank, action).is_ok()
        {}
    }
    board.deadlock().map_or(Ok(()), Err)
}

impl Board<'_> {
    /// Does a rank's next action, or returns whom it waits for, and what for.
    fn act(&mut self, rank: usize, action: Action) -> Result<(), (usize, Action)> {
        let Some((peer, mirrored)) = self.program.peer_of(&action).zip(action.mirrored()) else {
            self.can_compute(rank, action)?;
            self.next[rank] += 1;
            return Ok(());
        };
        let received = if let Action::Receive(message) = action { Some(message) } else { None };
        match self.rule {
            MessageRule::Mailbox => {
                if let Some(message) = received
                    && !*self.passed(message)
                {
                    return Err((peer, mirrored));
                }
                if let Action::Receive(message) = mirrored {
                    *self.passed(message) = true;
                    self.awake.push(peer);
                }
            }
            MessageRule::Rendezvous => {
                if self.program.rows[peer].get(self.next[peer]) != Some(&mirrored) {
                    return Err((peer, mirrored));
                }
                self.next[peer] += 1;
                self.awake.push(peer);
            }
            MessageRule::Fifo => {
                let place = Place { rank, position: self.next[rank], action };
                queue(&mut self.queues[rank], peer).push_back(place);
                self.pass(rank, peer);
            }
        }
        self.next[rank] += 1;
        Ok(())
    }

    fn passed(&mut self, at: Message) -> &mut bool {
        &mut self.passed[at.way as usize][at.stage * self.program.num_micro_batches + at.micro_batch]
    }

    /// With queues, a computation waits for what it uses. By the other rules its receive has waited.
    fn can_compute(&mut self, rank: usize, action: Action) -> Result<(), (usize, Action)> {
        if self.rule != MessageRule::Fifo {
            return Ok(());
        }
        for needed in action.works().filter_map(|work| self.program.needs(work)) {
            let receive = Action::Receive(needed);
            let Some((peer, send)) = self.program.peer_of(&receive).zip(receive.mirrored()) else { continue };
            if peer != rank && !*self.passed(needed) {
                return Err((peer, send));
            }
        }
        Ok(())
    }

    /// Lets the messages between two ranks pass while the first ones of both are two ends of one.
    fn pass(&mut self, rank: usize, peer: usize) {
        loop {
            let heads = [(rank, peer), (peer, rank)]
                .map(|(of, with)| queue(&mut self.queues[of], with).front().copied());
            let [Some(ours), Some(theirs)] = heads else { return };
            if ours.action.mirrored() != Some(theirs.action) {
                return;
            }
            for (of, with) in [(rank, peer), (peer, rank)] {
                queue(&mut self.queues[of], with).pop_front();
            }
            for place in [ours, theirs] {
                if let Action::Receive(message) = place.action {
                    *self.passed(message) = true;
                    self.awake.push(place.rank);
                }
            }
        }
    }

    /// Why a rank cannot continue or, with queues, cannot end.
    fn wait(&mut self, rank: usize) -> Option<Wait> {
        let position = self.next[rank];
        if let Some(&action) = self.program.rows[rank].get(position) {
            let (on, awaited) = self.act(rank, action).err()?;
            return Some(Wait { place: Place { rank, position, action }, on, awaited });
        }
        self.queues[rank].iter().find_map(|(on, queue)| {
            let place = *queue.front()?;
            Some(Wait { place, on: *on, awaited: place.action.mirrored()? })
        })
    }

    /// The circle in which ranks wait; or a chain, if the last one waits for a rank that has ended.
    fn deadlock(mut self) -> Option<Deadlock> {
        let rule = self.rule;
        let mut waits: Vec<Wait> = Vec::new();
        let mut rank = (0..self.next.len()).find(|rank| self.wait(*rank).is_some())?;
        loop {
            if let Some(start) = waits.iter().position(|wait| wait.place.rank == rank) {
                waits.drain(..start);
                return Some(Deadlock { rule, waits, is_circle: true });
            }
            match self.wait(rank) {
                Some(wait) => {
                    waits.push(wait);
                    rank = wait.on;
                }
                None => return Some(Deadlock { rule, waits, is_circle: false }),
            }
        }
    }
}

/// A rank's queue of messages with a peer.
fn queue(queues: &mut Vec<Queue>, peer: usize) -> &mut VecDeque<Place> {
    let found = queues.iter().position(|(with, _)| *with == peer);
    let at = found.unwrap_or(queues.len());
    if found.is_none() {
        queues.push((peer, VecDeque::new()));
    }
    &mut queues[at].1
}

impl fmt::Display for MessageRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mailbox => "mailbox",
            Self::Rendezvous => "rendezvous",
            Self::Fifo => "fifo",
        })
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} waits for {} of rank {}", self.place, self.awaited, self.on)
    }
}

impl fmt::Display for Waits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, wait) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{wait}", if number > 0 { ", " } else { "" })?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}
