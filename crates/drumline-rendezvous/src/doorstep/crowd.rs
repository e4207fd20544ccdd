//! A bounded number of strangers, in the order in which they came.

use super::Stranger;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// At most so many; when it is full, the oldest of the address that has most of them makes room.
pub(super) struct Crowd {
    held: BTreeMap<usize, Box<Stranger>>,
    addresses: Addresses,
    limit: usize,
    /// Nobody who has been here for less than this makes room.
    moment: Duration,
}

impl Crowd {
    pub(super) fn new(limit: usize, moment: Duration) -> Crowd {
        Crowd { held: BTreeMap::new(), addresses: Addresses::default(), limit, moment }
    }

    /// One more; if there is no room, another goes.
    pub(super) fn add(&mut self, token: usize, stranger: Box<Stranger>) {
        if self.is_full()
            && let Some(goes) = self.addresses.first_to_go()
        {
            self.take(goes);
        }
        self.addresses.add(token, stranger.from);
        self.held.insert(token, stranger);
    }

    pub(super) fn take(&mut self, token: usize) -> Option<Box<Stranger>> {
        let stranger = self.held.remove(&token)?;
        self.addresses.remove(token, stranger.from);
        Some(stranger)
    }

    pub(super) fn is_full(&self) -> bool {
        self.held.len() >= self.limit
    }

    /// When the oldest came.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.held.values().next().map(|stranger| stranger.since)
    }

    /// When one of them may make room; `None` if there is room.
    pub(super) fn room_at(&self) -> Option<Instant> {
        let goes = self.addresses.first_to_go().filter(|_| self.is_full())?;
        self.held.get(&goes).map(|stranger| stranger.since + self.moment)
    }

    /// Drops those who came at that time or before.
    pub(super) fn drop_since(&mut self, time: Option<Instant>) {
        while let Some((token, stranger)) = self.held.first_key_value()
            && time.is_some_and(|time| stranger.since <= time)
        {
            self.take(*token);
        }
    }

    /// One less, if it has had its moment.
    pub(super) fn drop_one(&mut self, now: Instant) -> bool {
        let goes = self.addresses.first_to_go().filter(|goes| self.held[goes].since + self.moment <= now);
        goes.is_some_and(|goes| self.take(goes).is_some())
    }
}

/// Who comes from where.
#[derive(Debug, Default)]
struct Addresses(HashMap<IpAddr, BTreeSet<usize>>);

impl Addresses {
    fn add(&mut self, token: usize, from: IpAddr) {
        self.0.entry(from).or_default().insert(token);
    }

    fn remove(&mut self, token: usize, from: IpAddr) {
        if let Some(tokens) = self.0.get_mut(&from) {
            tokens.remove(&token);
            if tokens.is_empty() {
                self.0.remove(&from);
            }
        }
    }

    /// The oldest of the address that has most of them.
    fn first_to_go(&self) -> Option<usize> {
        let firsts = self.0.values().filter_map(|tokens| Some((tokens.len(), *tokens.first()?)));
        firsts.max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest))).map(|(_, oldest)| oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    fn from(hosts: &[u8]) -> Addresses {
        let mut addresses = Addresses::default();
        hosts.iter().enumerate().for_each(|(token, number)| addresses.add(token, host(*number)));
        addresses
    }

    #[test]
    fn the_address_with_most_strangers_makes_room() {
        assert_eq!(from(&[]).first_to_go(), None);
        assert_eq!(from(&[1, 1, 1]).first_to_go(), Some(0), "all of one: the oldest");
        assert_eq!(from(&[1, 2, 2]).first_to_go(), Some(1), "not the oldest of all");
        assert_eq!(from(&[1, 2, 2, 1]).first_to_go(), Some(0), "as many: the older");
    }

    #[test]
    fn a_flood_from_one_address_pushes_out_none_of_another() {
        let mut held = from(&[1, 2, 3]);
        let mut last = 2;
        for token in 3..10_000 {
            if token >= 256 {
                let goes = held.first_to_go().unwrap();
                held.remove(goes, host(9));
                assert!(goes >= 3, "{goes}");
            }
            held.add(token, host(9));
            last = token;
        }
        assert!((1..=3).all(|number| held.0[&host(number)].len() == 1));
        assert_eq!(held.0[&host(9)].last(), Some(&last), "and the newest is always taken");
    }

    #[test]
    fn a_stranger_is_a_few_hundred_bytes() {
        assert!(size_of::<Stranger>() <= 1024, "{} bytes", size_of::<Stranger>());
    }
}
