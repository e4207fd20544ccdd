//! Whom this rank waits for, and why it may do so in vain: the other has gone, or holds itself up.

use super::post_office::PostOffice;
use super::slot::{Halt, Slot, To};
use super::streams::Carrier;
use super::{Source, Way};
use crate::shm::{Stop, Watch};
use crate::tcp::frame::MailHeader;

impl<C: Carrier> PostOffice<C> {
    /// Ranks something may come from, and ranks that something waits to go to.
    pub(super) fn awaited(&self, slots: &[Slot<'_>]) -> (Vec<usize>, Vec<usize>) {
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for slot in open(slots) {
            match slot.message.way {
                Way::Send { to, .. } => {
                    receivers.push(to);
                    senders.extend(self.others());
                }
                Way::Receive { from: Source::Any, .. } => senders.extend(self.others()),
                Way::Receive { from: Source::Rank(rank), .. } if rank != self.me => senders.push(rank),
                Way::Receive { .. } => {}
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

    /// Whether nothing more is taken from this rank until receives are made for its messages.
    pub(super) fn is_held_up(&self, rank: usize) -> bool {
        matches!(self.arriving[rank].letter, Some((_, To::Later)))
    }

    /// When the time is up: the message of a rank this call waits for that kept others of the same rank from coming.
    pub(super) fn blockade(&self, slots: &[Slot<'_>]) -> Option<Halt> {
        let waits_for = |rank| {
            open(slots).any(|slot| match slot.message.way {
                Way::Send { to: peer, .. } | Way::Receive { from: Source::Rank(peer), .. } => peer == rank,
                Way::Receive { from: Source::Any, .. } => true,
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
            "{elements} {dtype} with tag {tag}, which{before} are more than is kept for later and hold up what it \
             sends after them; try receiving them first"
        );
        Some(Halt::Misfit { from, what })
    }

    /// Why some message will never move, if there is one whose rank is gone.
    pub(super) fn absent(&mut self, slots: &[Slot<'_>], watch: &Watch<'_>) -> Option<Stop> {
        open(slots).find_map(|slot| match slot.message.way {
            // It has let go of its end, so there will be no more room.
            Way::Send { to, .. } => watch.has_left(to).then_some(Stop::Left(to)),
            Way::Receive { from: Source::Rank(rank), .. } => self.streams.end_of(watch, rank),
            Way::Receive { from: Source::Any, .. } => {
                // All are looked at: each has its own time to be given up in.
                let ends: Vec<_> = self.others().map(|rank| self.streams.end_of(watch, rank)).collect();
                ends.into_iter().collect::<Option<Vec<_>>>()?.into_iter().next()
            }
        })
    }
}

fn open<'s, 'a>(slots: &'s [Slot<'a>]) -> impl Iterator<Item = &'s Slot<'a>> {
    slots.iter().filter(|slot| slot.done.is_none())
}
