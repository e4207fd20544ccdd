//! Between ranks: how long a message takes, how many bytes a second go through, whether they arrive unchanged, and how far apart clocks are.
//!
//! ```text
//!   pair (a, b):   a ── 8 bytes ──▶ b ── 8 bytes ──▶ a      half of the median round trip is the latency
//!                  a ◀── ready ──── b
//!                  a ── 4 MiB ────▶ b ── 8 bytes ──▶ a      the fastest of some is the bandwidth
//!                                   b compares each byte, makes room for the next load, and only then is ready again
//! ```
//! One pair after the other, so that none disturbs another; all ranks go through the same list.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use drumline_comm::{CommError, ProcessGroup, Source};
use serde::{Deserialize, Serialize};

use super::host::Host;

const TAG: u64 = 11;
/// Round trips of a small message.
const PINGS: usize = 200;
/// Large messages, and their size.
const LOADS: usize = 8;
const LOAD_BYTES: usize = 4 << 20;
/// Exchanges of times; the quickest counts.
const CLOCK_PINGS: usize = 16;
/// Up to so many ranks, each pair is measured.
const ALL_PAIRS: usize = 8;

/// Two ranks and what is between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Link {
    pub(super) ranks: [usize; 2],
    pub(super) way: Way,
    pub(super) latency_us: f64,
    pub(super) gb_per_s: f64,
    /// Of those that were sent, how many arrived changed.
    pub(super) wrong_bytes: u64,
}

/// What messages go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    SharedMemory,
    Tcp,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::Tcp { "TCP" } else { "shared memory" })
    }
}

/// Which pairs are measured: all of few ranks; of many the neighbours, and the first ranks of each two machines. Pure.
fn pairs(machines: &[String]) -> Vec<[usize; 2]> {
    let all = (0..machines.len()).flat_map(|a| (a + 1..machines.len()).map(move |b| [a, b]));
    if machines.len() <= ALL_PAIRS {
        return all.collect();
    }
    let is_first = |rank: usize| !machines[..rank].contains(&machines[rank]);
    all.filter(|&[a, b]| b == a + 1 || is_first(a) && is_first(b)).collect()
}

/// Every pair, one after the other; called by all ranks. What was found is rank 0's to have.
pub(super) fn measure_all(group: &ProcessGroup, hosts: &[Host]) -> anyhow::Result<Vec<Link>> {
    let machines: Vec<String> = hosts.iter().map(|host| host.machine.clone()).collect();
    let mut own = Vec::new();
    for [a, b] in pairs(&machines) {
        let is_shared = machines[a] == machines[b] && group.transport() != "tcp";
        let way = if is_shared { Way::SharedMemory } else { Way::Tcp };
        let measured =
            || format!("the link between rank {a} ({}) and rank {b} ({})", hosts[a].name, hosts[b].name);
        match group.rank() {
            rank if rank == a => own.push(ask(group, [a, b], way).with_context(measured)?),
            rank if rank == b => answer(group, a).with_context(measured)?,
            _ => {}
        }
        // Those that wait do not disturb the next pair.
        group.barrier()?;
    }
    let mut all: Vec<Link> = group.all_gather_object(&own)?.concat();
    all.sort_by_key(|link| link.ranks);
    Ok(all)
}

fn ask(group: &ProcessGroup, ranks: [usize; 2], way: Way) -> Result<Link, CommError> {
    let to = ranks[1];
    let mut trips: Vec<Duration> =
        (0..PINGS).map(|_| round_trip(group, to, &[0u8; 8])).collect::<Result<_, _>>()?;
    trips.sort_unstable();
    let load = load(ranks[0]);
    let times = load_times(group, to, &load)?;
    let best = times.into_iter().min().unwrap_or_default().as_secs_f64();
    let mut wrong_bytes = [0u64];
    group.recv(&mut wrong_bytes, Source::Rank(to), TAG)?;
    let latency_us = trips[trips.len() / 2].as_secs_f64() * 1e6 / 2.0;
    Ok(Link { ranks, way, latency_us, gb_per_s: LOAD_BYTES as f64 / best / 1e9, wrong_bytes: wrong_bytes[0] })
}

/// How long each load took, and nothing else: the other side says when it waits for the next one.
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
    let mut small = [0u8; 8];
    for _ in 0..PINGS {
        group.recv(&mut small, Source::Rank(from), TAG)?;
        group.send(&small, from, TAG)?;
    }
    let expected = load(from);
    let wrong = take_loads(group, from, |got| wrong_bytes(got, &expected))?;
    group.send(&[wrong], from, TAG)
}

/// Takes each load when it is ready for it; the sum of what `count` finds in them.
fn take_loads(group: &ProcessGroup, from: usize, count: impl Fn(&[u8]) -> u64) -> Result<u64, CommError> {
    let (mut got, mut sum) = (vec![0u8; LOAD_BYTES], 0);
    for _ in 0..LOADS {
        // Written over first, so that what stays is seen.
        got.fill(!0);
        group.send(&[0u8; 8], from, TAG)?;
        group.recv(&mut got, Source::Rank(from), TAG)?;
        group.send(&[0u8; 8], from, TAG)?;
        sum += count(&got);
    }
    Ok(sum)
}

/// Bytes that differ from place to place and from rank to rank.
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

/// For each rank the seconds by which its clock is ahead of rank 0's. Called by all ranks.
pub(super) fn clock_skews(group: &ProcessGroup) -> Result<Vec<f64>, CommError> {
    let mut skews = vec![0.0; group.size()];
    for (rank, skew) in skews.iter_mut().enumerate().skip(1) {
        match group.rank() {
            0 => *skew = skew_of(group, rank)?,
            own if own == rank => {
                for _ in 0..CLOCK_PINGS {
                    group.recv(&mut [0.0f64], Source::Rank(0), TAG)?;
                    group.send(&[now()], 0, TAG)?;
                }
            }
            _ => {}
        }
    }
    group.broadcast(&mut skews, 0)?;
    Ok(skews)
}

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

/// Times of one exchange; the middle one by the other's clock.
#[derive(Debug, Clone, Copy)]
struct Exchange {
    sent: f64,
    theirs: f64,
    back: f64,
}

/// As NTP does it: of the quickest exchange, theirs is taken to be the middle of ours. Off by half its length at most.
fn skew(exchanges: &[Exchange]) -> f64 {
    let quickest = exchanges.iter().min_by(|a, b| (a.back - a.sent).total_cmp(&(b.back - b.sent)));
    quickest.map_or(0.0, |Exchange { sent, theirs, back }| theirs - (sent + back) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::LocalGroup;

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
    fn the_quickest_exchange_says_how_far_clocks_are_apart() {
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
        let found = LocalGroup::run(3, |group| {
            let mut hosts = vec![Host::here(); 3];
            hosts.iter_mut().enumerate().for_each(|(rank, host)| host.rank = rank);
            assert!(clock_skews(&group)?.iter().all(|skew| skew.abs() < 1.0));
            Ok(measure_all(&group, &hosts).unwrap())
        });
        let found = found.unwrap();
        assert_eq!(found[0], found[2]);
        assert_eq!(found[0].iter().map(|link| link.ranks).collect::<Vec<_>>(), [[0, 1], [0, 2], [1, 2]]);
        assert!(
            found[0].iter().all(|link| link.latency_us > 0.0 && link.gb_per_s > 0.0 && link.wrong_bytes == 0)
        );
    }
}
