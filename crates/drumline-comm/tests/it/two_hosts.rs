//! Two hosts in network namespaces: shared memory inside, links between them, and a cable that is cut.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, P2p, ProcessGroup, ReduceOp, Source};
use rank_test::anyhow::{Result, ensure};
use rank_test::netns::Hosts;
use rank_test::{Ranks, ranks_test};

use crate::numbers::{Number, buffer, check, value};

const SOON: Duration = Duration::from_secs(30);

/// A vanished host is noticed after this long at most.
const CUT_NOTICED: Duration = Duration::from_secs(11);

fn sum(ranks: usize, i: usize) -> i64 {
    (0..ranks).map(|rank| value(rank, i)).sum()
}

/// Every collective once, on `len` elements a rank.
fn every_collective<T: Number>(group: &ProcessGroup, len: usize) -> Result<(), CommError> {
    let (me, ranks) = (group.rank(), group.size());
    let what = |name: &str| format!("{name} of {len} {}", T::DTYPE);
    let mine = buffer::<T>(me, len);
    let mut data = mine.clone();
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    check(&data, |i| T::of(sum(ranks, i)), || what("all_reduce"));
    let mut heap = group.heap_alloc::<T>(len)?;
    heap.copy_from_slice(&mine);
    group.all_reduce(&mut heap, ReduceOp::Max)?;
    check(&heap, |i| T::of((0..ranks).map(|rank| value(rank, i)).max().unwrap()), || what("heap"));
    let mut all = vec![T::of(0); len * ranks];
    group.all_gather(&mine, &mut all)?;
    check(&all, |i| T::of(value(i / len, i % len)), || what("all_gather"));
    let counts: Vec<usize> = (0..ranks).map(|rank| len / (rank + 1)).collect();
    let mut some = vec![T::of(0); counts.iter().sum()];
    group.all_gather_uneven(&mine[..counts[me]], &mut some, &counts)?;
    check(&some[counts[0]..][..counts[1]], |i| T::of(value(1, i)), || what("all_gather_uneven"));
    let mut turned = vec![T::of(0); len * ranks];
    group.all_to_all(&all, &mut turned)?;
    check(&turned, |i| T::of(value(me, i % len)), || what("all_to_all"));
    let mut part = vec![T::of(0); len];
    group.reduce_scatter(&buffer::<T>(me, len * ranks), &mut part, ReduceOp::Sum)?;
    check(&part, |i| T::of(sum(ranks, me * len + i)), || what("reduce_scatter"));
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
    let mut part = vec![T::of(0); len];
    let whole = buffer::<T>(root, len * ranks);
    group.scatter((me == root).then_some(&whole[..]), &mut part, root)?;
    check(&part, |i| T::of(value(root, me * len + i)), || what("scatter"));
    Ok(())
}

/// Averages do not depend on how ranks are spread, and all ranks hold the same bits.
fn averages(group: &ProcessGroup) -> Result<(), CommError> {
    let mut data: Vec<f32> = (0..10_001).map(|i| 1.0 / (1 + i + group.rank()) as f32).collect();
    group.all_reduce(&mut data, ReduceOp::Avg)?;
    let close = |i: usize| {
        let exact: f64 =
            (0..group.size()).map(|rank| 1.0 / (1 + i + rank) as f64).sum::<f64>() / group.size() as f64;
        (f64::from(data[i]) - exact).abs() <= 4.0 * f64::from(f32::EPSILON) * exact
    };
    assert!((0..data.len()).all(close));
    let bits: Vec<u32> = data.iter().map(|x| x.to_bits()).collect();
    let mut all = vec![0u32; bits.len() * group.size()];
    group.all_gather(&bits, &mut all)?;
    assert!(all.chunks(bits.len()).all(|theirs| theirs == bits));
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
    assert_eq!((group.num_nodes(), group.transport()), (2, "shm+tcp"));
    listens_on_its_address_only()?;
    for len in [1, 5, 100, 30_001] {
        every_collective::<f32>(&group, len)?;
    }
    every_collective::<u8>(&group, 999)?;
    every_collective::<i16>(&group, 13)?;
    averages(&group)?;
    messages(&group)?;
    listens_on_its_address_only()?;
    // Every rank with its neighbour on the other host, and all groups at once.
    let pair = group.split(Some(group.rank() as u32 % 2), 0)?.expect("all have a color");
    every_collective::<f64>(&pair, 1000)?;
    let names = group.all_gather_object(&std::fs::read_to_string("/proc/sys/kernel/hostname")?)?;
    assert_eq!(
        names.iter().filter(|name| *name == "host0\n").count(),
        std::env::var("ON_HOST0")?.parse::<usize>()?
    );
    Ok(group.barrier()?)
}

/// Every listening socket of this host is bound to the host's own address.
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
    let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
    let ranks = ranks.clone().env([("ON_HOST0", lists[0].len().to_string())]);
    ranks.on_hosts(&hosts, lists).pass().map(drop)
}

ranks_test!(two_hosts_with_two_ranks_each, 4, { everything()? }, |ranks| {
    spread(&ranks, &[&[0, 1], &[2, 3]])?;
});

ranks_test!(one_rank_here_and_three_there, 4, { everything()? }, |ranks| {
    spread(&ranks, &[&[0], &[1, 2, 3]])?;
});

ranks_test!(ranks_dealt_out_in_turns, 5, { everything()? }, |ranks| {
    spread(&ranks, &[&[0, 2, 4], &[1, 3]])?;
});

/// All-reduces again and again, or messages if `MAIL` is set, until an error comes or somebody says `stop`.
fn go_on_until_the_cut() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let (me, ranks) = (group.rank(), group.size());
    let mut data = vec![1f32; 1 << 20];
    let (mine, mut theirs) = (vec![0u8; 100_000], vec![0u8; 100_000]);
    let rounds = if std::env::var("CUT").is_ok() { usize::MAX } else { 20 };
    let one_round = |round: usize| {
        if round == 10 {
            println!("under way");
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

/// Cuts the second host off while all are busy; every rank must hear of a rank on the other side, in time.
fn cut(ranks: &Ranks) -> Result<()> {
    let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
    let ranks = ranks.clone().on_hosts(&hosts, &[&[0, 1], &[2, 3]]);
    let running = ranks.clone().env([("CUT", "1")]).start()?;
    (0..4).try_for_each(|rank| running.wait_for_line(rank, "under way", SOON).map(drop))?;
    hosts.cut(1)?;
    let begin = Instant::now();
    for rank in 0..4 {
        let line = running.wait_for_line(rank, "verdict:", SOON)?;
        let time = begin.elapsed();
        ensure!(time < CUT_NOTICED, "rank {rank} after {time:?}: {line}");
        let others = if rank < 2 { ["rank 2", "rank 3"] } else { ["rank 0", "rank 1"] };
        ensure!(
            others.iter().any(|other| line.contains(other)),
            "rank {rank} names nobody over there: {line}"
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

ranks_test!(a_cut_cable_in_mid_collective_is_told_to_all, 4, { go_on_until_the_cut()? }, |ranks| {
    cut(&ranks)?;
});

ranks_test!(a_cut_cable_among_messages_is_told_to_all, 4, { go_on_until_the_cut()? }, |ranks| {
    cut(&ranks.env([("MAIL", "1")]))?;
});
