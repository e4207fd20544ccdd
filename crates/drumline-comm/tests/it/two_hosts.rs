//! Two hosts in network namespaces: shared memory inside, links between them, and a cable that is cut.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, P2p, ProcessGroup, ReduceOp, Source, bf16, f16};
use rank_test::anyhow::{Result, ensure};
use rank_test::netns::Hosts;
use rank_test::{Ranks, ranks_test};

use crate::grid::{every_collective, moves, reductions};
use crate::numbers::{Number, buffer, check, value};

const SOON: Duration = Duration::from_secs(30);

/// The number of `f32` in a mebibyte.
const MEBIBYTE: usize = (1 << 20) / size_of::<f32>();

/// A host that has vanished is noticed after this long at most.
const CUT_NOTICED: Duration = Duration::from_secs(11);

fn sum(ranks: usize, i: usize) -> i64 {
    (0..ranks).map(|rank| value(rank, i)).sum()
}

/// Every collective, on `len` elements a rank, even and uneven, in the heap, and with every root.
fn everything_of<T: Number>(group: &ProcessGroup, len: usize) -> Result<(), CommError> {
    let ranks = group.size();
    every_collective::<T>(group, len)?;
    let mut heap = group.heap_alloc::<T>(len)?;
    heap.copy_from_slice(&buffer::<T>(group.rank(), len));
    let mut all = vec![T::of(0); len * ranks];
    group.all_gather(&heap, &mut all)?;
    check(&all, |i| T::of(value(i / len, i % len)), || format!("all_gather of {len} from the heap"));
    group.all_reduce(&mut heap, ReduceOp::Max)?;
    let largest = |i| (0..ranks).map(|rank| value(rank, i)).max().unwrap();
    check(&heap, |i| T::of(largest(i)), || format!("all_reduce of {len} in the heap"));
    (0..ranks).try_for_each(|root| with_root::<T>(group, len, root))
}

fn with_root<T: Number>(group: &ProcessGroup, len: usize, root: usize) -> Result<(), CommError> {
    let (me, ranks) = (group.rank(), group.size());
    let what = |name: &str| format!("{name} of {len} {} at {root}", T::DTYPE);
    let mut data = buffer::<T>(me, len);
    group.broadcast(&mut data, root)?;
    check(&data, |i| T::of(value(root, i)), || what("broadcast"));
    let mut data = buffer::<T>(me, len);
    group.reduce(&mut data, root, ReduceOp::Sum)?;
    let want = |i| if me == root { sum(ranks, i) } else { value(me, i) };
    check(&data, |i| T::of(want(i)), || what("reduce"));
    let mut all = vec![T::of(0); len * ranks];
    group.gather(&buffer::<T>(me, len), (me == root).then_some(&mut all[..]), root)?;
    if me == root {
        check(&all, |i| T::of(value(i / len, i % len)), || what("gather"));
    }
    // Rank 0 gives nothing, every other more than the one before it.
    let counts: Vec<usize> = (0..ranks).map(|rank| len * rank / ranks).collect();
    let starts: Vec<usize> = (0..ranks).map(|rank| counts[..rank].iter().sum()).collect();
    let mut some = vec![T::of(0); counts.iter().sum()];
    let mine = buffer::<T>(me, counts[me]);
    group.gather_uneven(&mine, (me == root).then_some(&mut some[..]), &counts, root)?;
    for rank in (0..ranks).filter(|_| me == root) {
        let cell = &some[starts[rank]..][..counts[rank]];
        check(cell, |i| T::of(value(rank, i)), || what("gather_uneven"));
    }
    let mut part = vec![T::of(0); len];
    let whole = buffer::<T>(root, len * ranks);
    group.scatter((me == root).then_some(&whole[..]), &mut part, root)?;
    check(&part, |i| T::of(value(root, me * len + i)), || what("scatter"));
    Ok(())
}

/// Averages do not depend on how ranks are spread over hosts, and all ranks hold the same bits, also after a reduce-scatter.
fn averages(group: &ProcessGroup) -> Result<(), CommError> {
    let (me, ranks, len) = (group.rank(), group.size(), 2_003);
    let input: Vec<f32> = (0..len * ranks).map(|i| 1.0 / (1 + i + me) as f32).collect();
    let mut data = input.clone();
    group.all_reduce(&mut data, ReduceOp::Avg)?;
    let close = |i: usize| {
        let exact: f64 = (0..ranks).map(|rank| 1.0 / (1 + i + rank) as f64).sum::<f64>() / ranks as f64;
        (f64::from(data[i]) - exact).abs() <= 4.0 * f64::from(f32::EPSILON) * exact
    };
    assert!((0..data.len()).all(close));
    let bits: Vec<u32> = data.iter().map(|x| x.to_bits()).collect();
    let mut all = vec![0u32; bits.len() * ranks];
    group.all_gather(&bits, &mut all)?;
    assert!(all.chunks(bits.len()).all(|theirs| theirs == bits));
    let mut part = vec![0.0; len];
    group.reduce_scatter(&input, &mut part, ReduceOp::Avg)?;
    assert!(part.iter().map(|x| x.to_bits()).eq(bits[me * len..][..len].iter().copied()));
    Ok(())
}

/// Sums of halves are rounded once, after the last node.
fn halves(group: &ProcessGroup) -> Result<(), CommError> {
    let ranks = group.size();
    // 2048 + 1 is 2048 in f16, so rounding after each node would lose ones.
    let x = f16::from_f32(if group.rank() == 0 { 2048.0 } else { 1.0 });
    let exact = f16::from_f32(2048.0 + (ranks - 1) as f32);
    let mut data = vec![x; 3 * ranks];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    assert_eq!(data, vec![exact; 3 * ranks]);
    let mut part = [f16::ZERO; 3];
    group.reduce_scatter(&vec![x; 3 * ranks], &mut part, ReduceOp::Sum)?;
    assert_eq!(part, [exact; 3]);
    Ok(())
}

/// Messages to all others at once, small and large.
fn messages(group: &ProcessGroup) -> Result<(), CommError> {
    let (me, ranks) = (group.rank(), group.size());
    for len in [3, 200_000] {
        let mine = buffer::<u64>(me, len);
        let mut got: Vec<_> = (0..ranks).map(|_| vec![0; len]).collect();
        let sends = (0..ranks).map(|to| P2p::send(&mine, to, 1));
        let receives = got.iter_mut().enumerate().map(|(from, data)| P2p::recv(data, Source::Rank(from), 1));
        group.batch(sends.chain(receives).collect())?;
        assert!(got.iter().enumerate().all(|(from, data)| *data == buffer::<u64>(from, len)));
    }
    Ok(())
}

fn everything() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let num_hosts: usize = std::env::var("NUM_HOSTS")?.parse()?;
    assert_eq!((group.num_nodes(), group.transport()), (num_hosts, "shm+tcp"));
    listens_on_its_address_only()?;
    for len in [0, 1, 5, 100, 30_001, MEBIBYTE] {
        everything_of::<f32>(&group, len)?;
    }
    for len in [0, 1, 13, 999] {
        everything_of::<u8>(&group, len)?;
        everything_of::<i16>(&group, len)?;
        everything_of::<bf16>(&group, len)?;
        reductions::<bool>(&group, len)?;
        moves::<bool>(&group, len)?;
    }
    averages(&group)?;
    halves(&group)?;
    messages(&group)?;
    listens_on_its_address_only()?;
    // Every rank with its neighbour on the other host, and all groups at once.
    let pair = group.split(Some(group.rank() as u32 % 2), 0)?.expect("all have a color");
    everything_of::<f64>(&pair, 1000)?;
    let names = group.all_gather_object(&std::fs::read_to_string("/proc/sys/kernel/hostname")?)?;
    assert_eq!(
        names.iter().filter(|name| *name == "host0\n").count(),
        std::env::var("ON_HOST0")?.parse::<usize>()?
    );
    Ok(group.barrier()?)
}

/// An error unless every listening socket of this host is bound to the host's own address.
fn listens_on_its_address_only() -> Result<()> {
    for line in std::fs::read_to_string("/proc/net/tcp")?.lines().skip(1) {
        let fields: Vec<_> = line.split_whitespace().collect();
        if fields[3] == "0A" {
            // 10.77.0.x, as a little-endian number.
            ensure!(fields[1].contains("004D0A:"), "listens on {}", fields[1]);
        }
    }
    let six = std::fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
    ensure!(!six.lines().any(|line| line.split_whitespace().nth(3) == Some("0A")), "{six}");
    Ok(())
}

fn spread(ranks: &Ranks, lists: &[&[usize]]) -> Result<()> {
    let Some(hosts) = Hosts::new(lists.len())? else { return Ok(()) };
    let (num_hosts, on_host0) = (lists.len().to_string(), lists[0].len().to_string());
    let ranks = ranks.clone().env([("NUM_HOSTS", num_hosts), ("ON_HOST0", on_host0)]);
    ranks.on_hosts(&hosts, lists).pass().map(drop)
}

ranks_test!(two_hosts_with_two_ranks_each, 4, { everything()? }, |ranks| {
    spread(&ranks, &[&[0, 1], &[2, 3]])?;
});

ranks_test!(one_rank_here_and_three_there, 4, { everything()? }, |ranks| {
    spread(&ranks, &[&[0], &[1, 2, 3]])?;
});

ranks_test!(ranks_placed_in_turns, 5, { everything()? }, |ranks| {
    spread(&ranks, &[&[0, 2, 4], &[1, 3]])?;
});

ranks_test!(three_hosts_of_unequal_size, 6, { everything()? }, |ranks| {
    spread(&ranks, &[&[0, 3], &[1, 4, 5], &[2]])?;
});

/// Bytes that this host has sent through `device`.
fn sent_through(device: &str) -> Result<usize> {
    Ok(std::fs::read_to_string(format!("/sys/class/net/{device}/statistics/tx_bytes"))?.trim().parse()?)
}

/// The bytes that `act` sends through this host's `device`, for all ranks of the host together.
fn traffic(group: &ProcessGroup, device: &str, act: impl FnOnce() -> Result<(), CommError>) -> Result<usize> {
    group.barrier()?;
    let before = sent_through(device)?;
    group.barrier()?;
    act()?;
    group.barrier()?;
    let sent = sent_through(device)? - before;
    group.barrier()?;
    Ok(sent)
}

/// With 2 hosts of 2 ranks, each with `cell` bytes for every rank.
fn count_what_leaves() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let (me, ranks, cell) = (group.rank(), group.size(), 4 << 20);
    let (input, mut output) = (vec![1u8; cell * ranks], vec![0u8; cell * ranks]);
    // Makes all links.
    group.all_to_all(&input, &mut output)?;
    let inside =
        traffic(&group, "lo", || everything_of::<u8>(&group, cell / 4).and_then(|()| group.barrier()))?;
    if std::env::var("DRUMLINE_TRANSPORT").is_ok() {
        ensure!(inside > cell, "the control sends all over TCP, but only {inside} bytes");
        return Ok(());
    }
    ensure!(inside < 200_000, "ranks of one host sent each other {inside} bytes over TCP");
    let about = |what: &str, cells: usize, sent: usize| {
        let range = cells * cell..=cells * cell * 6 / 5 + 100_000;
        ensure!(range.contains(&sent), "{what}: {sent} bytes left the host, expected {range:?}");
        Ok(())
    };
    let sent = traffic(&group, "eth0", || group.all_to_all(&input, &mut output))?;
    about("all_to_all", 4, sent)?;
    let sent = traffic(&group, "eth0", || group.all_gather(&input[..cell], &mut output))?;
    about("all_gather", 2, sent)?;
    let sent = traffic(&group, "eth0", || group.reduce_scatter(&input, &mut output[..cell], ReduceOp::Max))?;
    about("reduce_scatter", 2, sent)?;
    // The control: twice that.
    let sent = traffic(&group, "eth0", || group.all_reduce(&mut output, ReduceOp::Max))?;
    about("all_reduce", 4, sent)?;
    let root = 1;
    let sent =
        traffic(&group, "eth0", || group.scatter((me == root).then_some(&input), &mut output[..cell], root))?;
    about("scatter", if me < 2 { 2 } else { 0 }, sent)?;
    let sent = traffic(&group, "eth0", || {
        group.gather(&input[..cell], (me == root).then_some(&mut output[..]), root)
    })?;
    about("gather", if me < 2 { 0 } else { 2 }, sent)
}

ranks_test!(only_what_the_other_host_needs_leaves_a_host, 4, { count_what_leaves()? }, |ranks| {
    spread(&ranks, &[&[0, 1], &[2, 3]])?;
    spread(&ranks.env([("DRUMLINE_TRANSPORT", "tcp")]), &[&[0, 1], &[2, 3]])?;
});

/// All-reduces again and again, or messages if `MAIL` is set, until there is an error.
fn run_until_the_cut() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let (me, ranks) = (group.rank(), group.size());
    let mut data = vec![1f32; 1 << 20];
    let (mine, mut theirs) = (vec![0u8; 100_000], vec![0u8; 100_000]);
    let rounds = if std::env::var("CUT").is_ok() { usize::MAX } else { 20 };
    let one_round = |round: usize| {
        if round == 10 {
            println!("at work");
        }
        if std::env::var("MAIL").is_err() {
            return group.all_reduce(&mut data, ReduceOp::Max);
        }
        let (right, left) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        group.batch(vec![P2p::send(&mine, right, 0), P2p::recv(&mut theirs, Source::Rank(left), 0)]).map(drop)
    };
    match (0..rounds).try_for_each(one_round) {
        Ok(()) => println!("verdict: all went well"),
        Err(error) => println!("verdict: {}", error.to_string().replace('\n', " | ")),
    }
    Ok(())
}

/// Cuts the second host off while all are busy; every rank must name a rank on the other side, in time.
fn cut(ranks: &Ranks) -> Result<()> {
    let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
    let ranks = ranks.clone().on_hosts(&hosts, &[&[0, 1], &[2, 3]]);
    // A shorter wait than for a host that may come back.
    let ranks = ranks.env([("DRUMLINE_HOST_TIMEOUT", "6s")]);
    let running = ranks.clone().env([("CUT", "1")]).start()?;
    (0..4).try_for_each(|rank| running.wait_for_line(rank, "at work", SOON).map(drop))?;
    hosts.cut(1)?;
    let begin = Instant::now();
    for rank in 0..4 {
        let line = running.wait_for_line(rank, "verdict:", SOON)?;
        let time = begin.elapsed();
        ensure!(time < CUT_NOTICED, "rank {rank} after {time:?}: {line}");
        let others = if rank < 2 { ["rank 2", "rank 3"] } else { ["rank 0", "rank 1"] };
        ensure!(
            others.iter().any(|other| line.contains(other)),
            "rank {rank} names no rank of the other host: {line}"
        );
    }
    let report = running.wait_all(SOON)?;
    ensure!(report.is_success(), "{report}");
    ensure!(begin.elapsed() < 2 * CUT_NOTICED, "they ended only after {:?}", begin.elapsed());
    hosts.restore(1)?;
    let control = ranks.pass()?;
    ensure!(
        control.ranks.iter().all(|rank| rank.stdout_text().contains("verdict: all went well")),
        "{control}"
    );
    Ok(())
}

ranks_test!(a_cable_cut_during_a_collective_is_an_error_on_all, 4, { run_until_the_cut()? }, |ranks| {
    cut(&ranks)?;
});

ranks_test!(a_cable_cut_among_messages_is_an_error_on_all, 4, { run_until_the_cut()? }, |ranks| {
    cut(&ranks.env([("MAIL", "1")]))?;
});

/// How long a cable is out that somebody trips over.
const OUTAGE: Duration = Duration::from_secs(7);

/// All-reduces with known results; prints how long the longest took.
fn sums_with_a_pause() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let (me, mut longest) = (group.rank() as u32, Duration::ZERO);
    for round in 0..40u32 {
        let mut data: Vec<u32> = (0..200_000).map(|i| i * (me + 1) + round).collect();
        let begin = Instant::now();
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        longest = longest.max(begin.elapsed());
        ensure!(
            data.iter().zip(0..).all(|(&sum, i)| sum == 3 * i + 2 * round),
            "a wrong sum in round {round}"
        );
        if round == 10 {
            println!("at work");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("verdict: {} ms", longest.as_millis());
    Ok(())
}

ranks_test!(an_outage_only_delays_the_calls, 2, { sums_with_a_pause()? }, |ranks| {
    let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
    let running = ranks.on_hosts(&hosts, &[&[0], &[1]]).start()?;
    (0..2).try_for_each(|rank| running.wait_for_line(rank, "at work", SOON).map(drop))?;
    hosts.cut(1)?;
    std::thread::sleep(OUTAGE);
    hosts.restore(1)?;
    for rank in 0..2 {
        let line = running.wait_for_line(rank, "verdict: ", SOON)?;
        let longest: u64 = line.trim_start_matches("verdict: ").trim_end_matches(" ms").parse()?;
        ensure!(Duration::from_millis(longest) > OUTAGE / 2, "rank {rank} did not see the outage: {line}");
    }
    let report = running.wait_all(SOON)?;
    ensure!(report.is_success(), "{report}");
});

/// All-reduces in two groups and messages, with known results, while the links are reset, as a firewall does; prints the number
/// of rounds. When data is lost with a connection, the rank that sent it may already be in another call, of another group or
/// kind.
fn calls_while_links_are_reset() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let other = group.new_group(&[0, 1])?.expect("both are members");
    let me = group.rank() as u32;
    let mut begin = Instant::now();
    let (mut round, mut may_continue) = (0, [true]);
    while may_continue[0] {
        let mut data: Vec<u32> = (0..200_000).map(|i| i * (me + 1) + round).collect();
        [&group, &other][round as usize % 2].all_reduce(&mut data, ReduceOp::Sum)?;
        ensure!(
            data.iter().zip(0..).all(|(&sum, i)| sum == 3 * i + 2 * round),
            "a wrong sum in round {round}"
        );
        // One of them only sends, and continues.
        if me == round % 2 {
            group.send(&data, 1 - me as usize, 7)?;
        } else {
            let mut received = vec![0; data.len()];
            group.recv(&mut received, Source::Rank(1 - me as usize), 7)?;
            ensure!(received == data, "a wrong message in round {round}");
        }
        if round == 3 {
            println!("at work");
            begin = Instant::now();
        }
        round += 1;
        may_continue[0] = round < 5 || begin.elapsed() < Duration::from_secs(4);
        group.broadcast(&mut may_continue, 0)?;
    }
    println!("verdict: {round} rounds");
    Ok(())
}

/// Resets the connections that host 1 has to ranks on host 0, but not those to the store; returns how many.
fn reset_links(hosts: &Hosts) -> Result<usize> {
    let filter =
        ["-K", "-t", "-n", "-H", "state", "established", "dst", "10.77.0.1", "dport", "gt", ":30000"];
    let output = hosts.command(1, "ss").args(filter).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().count())
}

ranks_test!(links_that_are_reset_are_reconnected, 2, { calls_while_links_are_reset()? }, |ranks| {
    let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
    if !rank_test::require_tool("ss") {
        return Ok(());
    }
    for security in ["none", "mac", "aead"] {
        let ranks = ranks.clone().env([("DRUMLINE_LINK_SECURITY", security)]).on_hosts(&hosts, &[&[0], &[1]]);
        let running = ranks.start()?;
        (0..2).try_for_each(|rank| running.wait_for_line(rank, "at work", SOON).map(drop))?;
        let mut num_reset = 0;
        for _ in 0..8 {
            num_reset += reset_links(&hosts)?;
            std::thread::sleep(Duration::from_millis(100));
            // What is sent meanwhile is certainly lost.
            hosts.cut(1)?;
            std::thread::sleep(Duration::from_millis(50));
            num_reset += reset_links(&hosts)?;
            hosts.restore(1)?;
            std::thread::sleep(Duration::from_millis(100));
        }
        ensure!(num_reset >= 3, "{security}: only {num_reset} connections were reset");
        (0..2).try_for_each(|rank| running.wait_for_line(rank, "verdict: ", SOON).map(drop))?;
        let report = running.wait_all(SOON)?;
        ensure!(report.is_success(), "{security}: {report}");
    }
});
