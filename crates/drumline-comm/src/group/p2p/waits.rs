//! The ranks that this one waits for, and why a wait may never end: the other rank has ended, or blocks itself.

use super::router::Router;
use super::slot::{Destination, Halt, Slot};
use super::streams::Carrier;
use super::{Direction, Source};
use crate::shm::{Stop, Watch};
use crate::tcp::frame::MailHeader;

impl<C: Carrier> Router<C> {
    /// The ranks that something may arrive from, and the ranks that something is to be sent to.
    pub(super) fn awaited(&self, slots: &[Slot<'_>]) -> (Vec<usize>, Vec<usize>) {
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for slot in open(slots) {
            match slot.message.direction {
                Direction::Send { to, .. } => {
                    receivers.push(to);
                    senders.extend(self.others());
                }
                Direction::Receive { from: Source::Any, .. } => senders.extend(self.others()),
                Direction::Receive { from: Source::Rank(rank), .. } if rank != self.me => senders.push(rank),
                Direction::Receive { .. } => {}
            }
        }
        senders.sort_unstable();
        senders.dedup();
        (senders, receivers)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<C> {
        let me = self.me;
        (0..self.arriving.len()).filter(move |&rank| rank != me)
    }

    /// Whether nothing more is read from this rank until receives are made for its messages.
    pub(super) fn is_held_up(&self, rank: usize) -> bool {
        matches!(self.arriving[rank].letter, Some((_, Destination::Later)))
    }

    /// After a timeout: the message that blocked a rank this call waits for, because it is too long to be kept.
    pub(super) fn blockade(&self, slots: &[Slot<'_>]) -> Option<Halt> {
        let waits_for = |rank| {
            open(slots).any(|slot| match slot.message.direction {
                Direction::Send { to: peer, .. } | Direction::Receive { from: Source::Rank(peer), .. } => {
                    peer == rank
                }
                Direction::Receive { from: Source::Any, .. } => true,
            })
        };
        let from = self.others().find(|&rank| self.is_held_up(rank) && waits_for(rank))?;
        let arriving = &self.arriving[from];
        let (MailHeader { tag, elements, dtype }, _) = arriving.letter.as_ref()?;
        let before = match arriving.kept {
            0 => String::new(),
            kept => format!(" with the {kept} bytes before them"),
        };
        let what = format!(
            "{elements} {dtype} with tag {tag}, which{before} are more than is kept for later and block what it \
             sends after them; try receiving them first"
        );
        Some(Halt::BadMessage { from, what })
    }

    /// Why some message will never move, if its rank has ended.
    pub(super) fn absent(&mut self, slots: &[Slot<'_>], watch: &Watch<'_>) -> Option<Stop> {
        open(slots).find_map(|slot| match slot.message.direction {
            // It has dropped its end, so there will be no more room.
            Direction::Send { to, .. } => watch.has_left(to).then_some(Stop::Left(to)),
            Direction::Receive { from: Source::Rank(rank), .. } => self.streams.end_of(watch, rank),
            Direction::Receive { from: Source::Any, .. } => {
                // All are asked: each of them has its own grace period.
                let ends: Vec<_> = self.others().map(|rank| self.streams.end_of(watch, rank)).collect();
                ends.into_iter().collect::<Option<Vec<_>>>()?.into_iter().next()
            }
        })
    }
}

fn open<'s, 'a>(slots: &'s [Slot<'a>]) -> impl Iterator<Item = &'s Slot<'a>> {
    slots.iter().filter(|slot| slot.done.is_none())
}
