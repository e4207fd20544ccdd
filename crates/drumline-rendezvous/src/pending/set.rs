//! A bounded set of pending connections, in the order in which they arrived.

use super::PendingConnection;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// A bounded set. When it is full, the oldest connection of the address with the most connections is dropped.
pub(super) struct PendingSet {
    held: BTreeMap<usize, Box<PendingConnection>>,
    addresses: Addresses,
    limit: usize,
    /// A connection younger than this is not dropped for another.
    moment: Duration,
}

impl PendingSet {
    pub(super) fn new(limit: usize, moment: Duration) -> PendingSet {
        PendingSet { held: BTreeMap::new(), addresses: Addresses::default(), limit, moment }
    }

    /// Adds a connection; if there is no room, another one is dropped.
    pub(super) fn add(&mut self, token: usize, connection: Box<PendingConnection>) {
        if self.is_full()
            && let Some(dropped) = self.addresses.first_to_drop()
        {
            self.take(dropped);
        }
        self.addresses.add(token, connection.from);
        self.held.insert(token, connection);
    }

    pub(super) fn take(&mut self, token: usize) -> Option<Box<PendingConnection>> {
        let connection = self.held.remove(&token)?;
        self.addresses.remove(token, connection.from);
        Some(connection)
    }

    pub(super) fn is_full(&self) -> bool {
        self.held.len() >= self.limit
    }

    /// When the oldest one arrived.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.held.values().next().map(|connection| connection.since)
    }

    /// When one of them may be dropped; `None` if there is room.
    pub(super) fn room_at(&self) -> Option<Instant> {
        let dropped = self.addresses.first_to_drop().filter(|_| self.is_full())?;
        self.held.get(&dropped).map(|connection| connection.since + self.moment)
    }

    /// Drops those that arrived at that time or before.
    pub(super) fn drop_since(&mut self, time: Option<Instant>) {
        while let Some((token, connection)) = self.held.first_key_value()
            && time.is_some_and(|time| connection.since <= time)
        {
            self.take(*token);
        }
    }

    /// Drops one connection, if it is old enough.
    pub(super) fn drop_one(&mut self, now: Instant) -> bool {
        let dropped =
            self.addresses.first_to_drop().filter(|dropped| self.held[dropped].since + self.moment <= now);
        dropped.is_some_and(|dropped| self.take(dropped).is_some())
    }
}

/// The connections of each address.
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

    /// The oldest connection of the address with the most connections.
    fn first_to_drop(&self) -> Option<usize> {
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
    fn the_address_with_the_most_connections_loses_one() {
        assert_eq!(from(&[]).first_to_drop(), None);
        assert_eq!(from(&[1, 1, 1]).first_to_drop(), Some(0), "one address: its oldest");
        assert_eq!(from(&[1, 2, 2]).first_to_drop(), Some(1), "not the oldest of all");
        assert_eq!(from(&[1, 2, 2, 1]).first_to_drop(), Some(0), "equal numbers: the older");
    }

    #[test]
    fn a_flood_from_one_address_displaces_none_of_another() {
        let mut held = from(&[1, 2, 3]);
        let mut last = 2;
        for token in 3..10_000 {
            if token >= 256 {
                let dropped = held.first_to_drop().unwrap();
                held.remove(dropped, host(9));
                assert!(dropped >= 3, "{dropped}");
            }
            held.add(token, host(9));
            last = token;
        }
        assert!((1..=3).all(|number| held.0[&host(number)].len() == 1));
        assert_eq!(held.0[&host(9)].last(), Some(&last), "the newest is always accepted");
    }

    #[test]
    fn a_pending_connection_is_at_most_a_kilobyte() {
        assert!(size_of::<PendingConnection>() <= 1024, "{} bytes", size_of::<PendingConnection>());
    }
}
