//! Links between ranks: latency, bandwidth, whether bytes arrive unchanged, and how far apart the clocks are.
//!
//! ```text
//!   pair (a, b):   a ── time ─────▶ b ── time ─────▶ a      the fastest of several shows how far apart the clocks are
//!                  a ── 8 bytes ──▶ b ── 8 bytes ──▶ a      half of the median round trip is the latency
//!                  a ◀── ready ──── b
//!                  a ── 4 MiB ────▶ b ── 8 bytes ──▶ a      the fastest of several is the bandwidth
//!                                   b compares each byte, clears the buffer, and only then is ready again
//! ```
//! Pairs are measured one after the other, so that none disturbs another. All ranks go through the same list, and read the result
//! of each pair from the board. A pair that fails ends the group: the rest of the list is not measured, and the results before it
//! are reported.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drumline_comm::{CommError, ProcessGroup, Source};
use serde::{Deserialize, Serialize};

use super::board::Board;
use super::host::Host;

/// How long others may take for a pair: 32 MiB at half a megabit per second.
const LONGEST_PAIR: Duration = Duration::from_secs(600);

const TAG: u64 = 11;
/// Round trips of a small message.
const PINGS: usize = 200;
/// Large messages, and their size.
const LOADS: usize = 8;
const LOAD_BYTES: usize = 4 << 20;
/// Exchanges of times; the fastest counts.
const CLOCK_PINGS: usize = 16;
/// Up to this many ranks, each pair is measured.
const ALL_PAIRS: usize = 8;

/// Two ranks and the link between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Link {
    pub(super) ranks: [usize; 2],
    #[serde(rename = "way")]
    pub(super) kind: LinkKind,
    pub(super) latency_us: f64,
    pub(super) gb_per_s: f64,
    /// How many of the sent bytes arrived changed.
    pub(super) wrong_bytes: u64,
}

/// The results of all pairs.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Measured {
    pub(super) links: Vec<Link>,
    pub(super) failed: Option<FailedPair>,
}

/// The pair that failed, after which nothing was measured.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FailedPair {
    pub(super) ranks: [usize; 2],
    pub(super) kind: LinkKind,
    pub(super) cause: String,
    /// The number of pairs that were to come after it.
    pub(super) num_left: usize,
}

/// The result of a pair, as its first rank reports it.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Measured {
        link: Link,
        /// How far the second rank's clock is ahead of the first's.
        ahead_s: f64,
    },
    Failed {
        cause: String,
    },
}

/// What messages travel through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LinkKind {
    SharedMemory,
    Tcp,
}

impl std::fmt::Display for LinkKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::Tcp { "TCP" } else { "shared memory" })
    }
}

/// Which pairs are measured: all of a few ranks; of many the neighbours, and the first ranks of each two machines.
fn pairs(machines: &[String]) -> Vec<[usize; 2]> {
    let all = (0..machines.len()).flat_map(|a| (a + 1..machines.len()).map(move |b| [a, b]));
    if machines.len() <= ALL_PAIRS {
        return all.collect();
    }
    let is_first = |rank: usize| !machines[..rank].contains(&machines[rank]);
    all.filter(|&[a, b]| b == a + 1 || is_first(a) && is_first(b)).collect()
}

/// Measures every pair, one after the other, and the clocks of machines. All ranks call it. An error only if the board cannot be
/// reached.
pub(super) fn measure_all(
    group: &ProcessGroup,
    board: &Board,
    hosts: &mut [Host],
) -> anyhow::Result<Measured> {
    measure_with(group, board, hosts, |pair, kind| {
        if group.rank() == pair[0] {
            return ask(group, pair, kind).map(Some);
        }
        answer(group, pair[0]).map(|()| None)
    })
}

/// As [`measure_all`]. Both ranks of a pair call `measure`; the first returns the result.
fn measure_with(
    group: &ProcessGroup,
    board: &Board,
    hosts: &mut [Host],
    measure: impl Fn([usize; 2], LinkKind) -> Result<Option<Outcome>, CommError>,
) -> anyhow::Result<Measured> {
    let machines: Vec<String> = hosts.iter().map(|host| host.machine.clone()).collect();
    let (pairs, mut measured) = (pairs(&machines), Measured::default());
    for (number, &ranks) in pairs.iter().enumerate() {
        let is_shared = machines[ranks[0]] == machines[ranks[1]] && group.transport() != "tcp";
        let kind = if is_shared { LinkKind::SharedMemory } else { LinkKind::Tcp };
        let name = format!("the link between ranks {} and {}", ranks[0], ranks[1]);
        if ranks.contains(&group.rank()) {
            match measure(ranks, kind) {
                Ok(Some(outcome)) => board.write(&name, &outcome)?,
                Err(error) if group.rank() == ranks[0] => {
                    board.write(&name, &Outcome::Failed { cause: error.to_string() })?;
                }
                // The first rank of the pair reports it.
                Ok(None) | Err(_) => {}
            }
        }
        // Waiting ranks do not disturb the pair.
        match board.read(&name, LONGEST_PAIR)? {
            Outcome::Measured { link, ahead_s } => {
                measured.links.push(link);
                if ranks[0] == 0 {
                    hosts[ranks[1]].clock_ahead_s = Some(ahead_s);
                }
            }
            Outcome::Failed { cause } => {
                let num_left = pairs.len() - number - 1;
                measured.failed = Some(FailedPair { ranks, kind, cause, num_left });
                break;
            }
        }
    }
    Ok(measured)
}

fn ask(group: &ProcessGroup, ranks: [usize; 2], kind: LinkKind) -> Result<Outcome, CommError> {
    let to = ranks[1];
    let ahead_s = skew_of(group, to)?;
    let mut trips: Vec<Duration> =
        (0..PINGS).map(|_| round_trip(group, to, &[0u8; 8])).collect::<Result<_, _>>()?;
    trips.sort_unstable();
    let load = load(ranks[0]);
    let times = load_times(group, to, &load)?;
    let best = times.into_iter().min().unwrap_or_default().as_secs_f64();
    let mut wrong_bytes = [0u64];
    group.recv(&mut wrong_bytes, Source::Rank(to), TAG)?;
    let latency_us = trips[trips.len() / 2].as_secs_f64() * 1e6 / 2.0;
    let gb_per_s = LOAD_BYTES as f64 / best / 1e9;
    Ok(Outcome::Measured {
        link: Link { ranks, kind, latency_us, gb_per_s, wrong_bytes: wrong_bytes[0] },
        ahead_s,
    })
}

/// The time of each load, and of nothing else: the other side says when it is ready for the next one.
fn load_times(group: &ProcessGroup, to: usize, load: &[u8]) -> Result<Vec<Duration>, CommError> {
    let timed = |_| {
        group.recv(&mut [0u8; 8], Source::Rank(to), TAG)?;
        round_trip(group, to, load)
    };
    (0..LOADS).map(timed).collect()
}

fn round_trip(group: &ProcessGroup, to: usize, data: &[u8]) -> Result<Duration, CommError> {
    let (began, mut back) = (Instant::now(), [0u8; 8]);
    group.send(data, to, TAG)?;
    group.recv(&mut back, Source::Rank(to), TAG)?;
    Ok(began.elapsed())
}

fn answer(group: &ProcessGroup, from: usize) -> Result<(), CommError> {
    for _ in 0..CLOCK_PINGS {
        group.recv(&mut [0.0f64], Source::Rank(from), TAG)?;
        group.send(&[now()], from, TAG)?;
    }
    let mut small = [0u8; 8];
    for _ in 0..PINGS {
        group.recv(&mut small, Source::Rank(from), TAG)?;
        group.send(&small, from, TAG)?;
    }
    let expected = load(from);
    let wrong = take_loads(group, from, |got| wrong_bytes(got, &expected))?;
    group.send(&[wrong], from, TAG)
}

/// Receives the loads, each when this rank is ready for it. Returns the sum of `count` over them.
fn take_loads(group: &ProcessGroup, from: usize, count: impl Fn(&[u8]) -> u64) -> Result<u64, CommError> {
    let (mut got, mut sum) = (vec![0u8; LOAD_BYTES], 0);
    for _ in 0..LOADS {
        // Overwritten first, so that missing bytes are noticed.
        got.fill(!0);
        group.send(&[0u8; 8], from, TAG)?;
        group.recv(&mut got, Source::Rank(from), TAG)?;
        group.send(&[0u8; 8], from, TAG)?;
        sum += count(&got);
    }
    Ok(sum)
}

/// Bytes that depend on their position and on the rank.
fn load(rank: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(rank as u64 + 1);
    let mut word = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state.to_be_bytes()
    };
    (0..LOAD_BYTES / 8).flat_map(|_| word()).collect()
}

fn wrong_bytes(got: &[u8], expected: &[u8]) -> u64 {
    got.iter().zip(expected).filter(|(got, expected)| got != expected).count() as u64
}

/// The seconds by which a rank's clock is ahead of this one's.
fn skew_of(group: &ProcessGroup, rank: usize) -> Result<f64, CommError> {
    let mut exchanges = Vec::new();
    for _ in 0..CLOCK_PINGS {
        let (sent, mut theirs) = (now(), [0.0f64]);
        group.send(&[sent], rank, TAG)?;
        group.recv(&mut theirs, Source::Rank(rank), TAG)?;
        exchanges.push(Exchange { sent, theirs: theirs[0], back: now() });
    }
    Ok(skew(&exchanges))
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64())
}

/// The times of one exchange; the middle one is from the other's clock.
#[derive(Debug, Clone, Copy)]
struct Exchange {
    sent: f64,
    theirs: f64,
    back: f64,
}

/// As in NTP: in the fastest exchange, their time is taken to be the middle of ours. The error is at most half its length.
fn skew(exchanges: &[Exchange]) -> f64 {
    let quickest = exchanges.iter().min_by(|a, b| (a.back - a.sent).total_cmp(&(b.back - b.sent)));
    quickest.map_or(0.0, |Exchange { sent, theirs, back }| theirs - (sent + back) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::LocalGroup;
    use drumline_rendezvous::MemoryStore;
    use std::sync::Arc;

    fn hosts(num: usize) -> Vec<Host> {
        (0..num).map(|rank| Host { rank, ..Host::here() }).collect()
    }

    /// The results of three ranks; if a pair is `broken`, its second rank aborts the group.
    fn with_broken(broken: [usize; 2]) -> Vec<Measured> {
        let store = Arc::new(MemoryStore::new());
        let found = LocalGroup::run(3, |group| {
            let board = Board::new(store.clone(), group.rank(), 3);
            let measure = |pair: [usize; 2], kind| match group.rank() {
                rank if rank == pair[1] && pair == broken => Err(group.abort("the cable is out")),
                rank if rank == pair[1] => answer(&group, pair[0]).map(|()| None),
                _ => ask(&group, pair, kind).map(Some),
            };
            Ok(measure_with(&group, &board, &mut hosts(3), measure).unwrap())
        });
        found.unwrap()
    }

    #[test]
    fn a_pair_that_fails_is_named_and_results_before_it_are_kept() {
        let pairs = |found: &Measured| found.links.iter().map(|link| link.ranks).collect::<Vec<_>>();
        for (broken, before, num_left) in
            [([0, 1], &[][..], 2), ([0, 2], &[[0, 1]], 1), ([1, 2], &[[0, 1], [0, 2]], 0)]
        {
            let found = with_broken(broken);
            assert_eq!(found[0], found[1]);
            assert_eq!(found[0], found[2], "all ranks know it");
            assert_eq!(pairs(&found[0]), before);
            let failed = found[0].failed.as_ref().unwrap();
            assert_eq!((failed.ranks, failed.num_left), (broken, num_left));
            assert!(failed.cause.contains("the cable is out"), "{}", failed.cause);
        }
        // Control: no pair is broken.
        let found = with_broken([2, 1]);
        assert_eq!((pairs(&found[0]).len(), &found[0].failed), (3, &None));
    }

    #[test]
    fn few_ranks_have_all_pairs_and_many_have_neighbours_and_machines() {
        let machines = |each: &[usize]| -> Vec<String> {
            each.iter().enumerate().flat_map(|(machine, ranks)| vec![machine.to_string(); *ranks]).collect()
        };
        assert_eq!(pairs(&machines(&[1])), [[0usize; 2]; 0]);
        assert_eq!(pairs(&machines(&[2, 1])), [[0, 1], [0, 2], [1, 2]]);
        assert_eq!(pairs(&machines(&[8])).len(), 28);
        let many = pairs(&machines(&[4, 4, 4]));
        assert_eq!(many.len(), 11 + 3, "{many:?}");
        assert!([[0, 4], [0, 8], [4, 8], [3, 4], [10, 11]].iter().all(|pair| many.contains(pair)));
    }

    #[test]
    fn the_fastest_exchange_shows_how_far_apart_clocks_are() {
        let at = |sent: f64, out: f64, home: f64| Exchange {
            sent,
            theirs: sent + out + 7.0,
            back: sent + out + home,
        };
        let found = skew(&[at(0.0, 0.9, 0.1), at(5.0, 0.01, 0.01), at(9.0, 0.1, 0.8)]);
        assert!((found - 7.0).abs() < 1e-9, "{found}");
        assert_eq!(skew(&[]), 0.0);
    }

    #[test]
    fn a_changed_byte_is_counted() {
        let mut got = load(3);
        assert_eq!(wrong_bytes(&got, &load(3)), 0);
        (got[7], got[4000]) = (!got[7], !got[4000]);
        assert_eq!(wrong_bytes(&got, &load(3)), 2);
        assert!(wrong_bytes(&load(3), &load(4)) > LOAD_BYTES as u64 / 2);
    }

    #[test]
    fn comparing_is_not_in_the_time_of_a_load() {
        let comparing = Duration::from_millis(200);
        let times = LocalGroup::run(2, |group| {
            if group.rank() == 0 {
                return load_times(&group, 1, &load(0));
            }
            take_loads(&group, 0, |_| {
                std::thread::sleep(comparing);
                0
            })?;
            Ok(Vec::new())
        });
        let mut times = times.unwrap().concat();
        times.sort_unstable();
        assert_eq!(times.len(), LOADS);
        assert!(times[LOADS / 2] < comparing, "{times:?}");
    }

    #[test]
    fn links_of_threads_are_measured_and_intact() {
        let store = Arc::new(MemoryStore::new());
        let found = LocalGroup::run(3, |group| {
            let (board, mut hosts) = (Board::new(store.clone(), group.rank(), 3), hosts(3));
            let measured = measure_all(&group, &board, &mut hosts).unwrap();
            assert!(hosts.iter().all(|host| host.clock_ahead_s.is_none_or(|ahead| ahead.abs() < 1.0)));
            assert_eq!(hosts.iter().filter(|host| host.clock_ahead_s.is_some()).count(), 2, "all but rank 0");
            assert_eq!(measured.failed, None);
            Ok(measured.links)
        });
        let found = found.unwrap();
        assert_eq!(found[0], found[2]);
        assert_eq!(found[0].iter().map(|link| link.ranks).collect::<Vec<_>>(), [[0, 1], [0, 2], [1, 2]]);
        assert!(
            found[0].iter().all(|link| link.latency_us > 0.0 && link.gb_per_s > 0.0 && link.wrong_bytes == 0)
        );
    }
}
