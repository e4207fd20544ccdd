//! `cargo xtask bench collectives`: reads the options, holds the contest, writes the results.
//!
//! A unit is one contender at one size of one operation. The machine is probed before and after each (`placement`).

mod built;
mod contenders;
mod contest;
mod figures;
mod goals;
mod page;
mod placement;
pub(super) mod record;
mod sizes;

use super::contest::TallyOf;
use super::pace::Pace;
use super::{machine, report};
use anyhow::Context;
use contenders::{ALL_REDUCE, BARRIER, Case, Manner, Op, Peer};
use contest::Calls;
use placement::{Cores, Placement};
use sizes::ByteSize;
use std::fs;
use std::time::Duration;

/// Compare ours with the peers, unit by unit in turn
#[derive(clap::Args, Debug)]
pub(crate) struct CollectivesArgs {
    /// Operations
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "all-reduce,broadcast,reduce-scatter,all-gather,all-to-all"
    )]
    op: Vec<Op>,
    /// Numbers of ranks; 4 is measured for all-reduce only, unless one operation is asked for
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    world: Vec<usize>,
    /// Sizes in bytes, with K, M or G
    #[arg(long, value_delimiter = ',', default_value = "16,4K,64K,1M,4M,16M,64M")]
    sizes: Vec<ByteSize>,
    #[command(flatten)]
    pace: Pace<5>,
    /// Seconds of measuring per unit
    #[arg(long, default_value_t = 0.4)]
    seconds_per_size: f64,
    /// Whom to compare with
    #[arg(long, value_delimiter = ',', default_value = "ompi,mpich,gloo,floor,socket")]
    peers: Vec<Peer>,
    /// Leave our own side out
    #[arg(long)]
    no_ours: bool,
    /// Buffers that have left the caches since they were written
    #[arg(long)]
    cold: bool,
    /// Placement of the cores by the host that counts, where it changes
    #[arg(long, value_enum, default_value = "apart")]
    cores: Cores,
}

/// Builds, measures, judges, writes.
pub(crate) fn run(args: &CollectivesArgs) -> anyhow::Result<()> {
    let built = built::build(&args.peers, !args.no_ours);
    built.missing.iter().for_each(|line| eprintln!("left out: {line}\n"));
    let floor =
        built.floor.clone().context("the floor program is the probe of every unit and was not built")?;
    eprintln!("watching how the host places our cores ...");
    let mut contest = Calls {
        manner: manner(args),
        placement: Placement::watch(&floor, args.cores),
        built,
        peers: args.peers.clone(),
        with_ours: !args.no_ours,
        cores: machine::cores(),
    };
    let tally = super::contest::hold(&mut contest, &cases(args), &args.pace);
    let text = page::markdown(&tally, about(args, &contest, &tally));
    report::save(&report::name("collectives", args.pace.quick), &text, &page::csv(&tally))?;
    print!("{text}");
    Ok(())
}

fn manner(args: &CollectivesArgs) -> Manner {
    let seconds = args.pace.at_most(args.seconds_per_size, 0.05);
    Manner { per_size: Duration::from_secs_f64(seconds), cold: args.cold }
}

/// More ranks than two are a matter of the all-reduce goals; of others only when they are asked for alone.
fn cases(args: &CollectivesArgs) -> Vec<Case> {
    let alone = args.op.len() == 1;
    let pairs = args.op.iter().flat_map(|op| args.world.iter().map(|world| (*op, *world)));
    let wanted = pairs.filter(|(op, world)| alone || *op == ALL_REDUCE || *world == 2);
    let sizes = |op| if op == BARRIER { vec![ByteSize(0)] } else { args.sizes.clone() };
    wanted
        .flat_map(|(op, world)| sizes(op).into_iter().map(move |size| Case { op, world, bytes: size.0 }))
        .collect()
}

fn about(args: &CollectivesArgs, contest: &Calls, tally: &TallyOf<Calls>) -> Vec<String> {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let temperature = if args.cold { "cold" } else { "hot" };
    let lines = [
        machine::describe(),
        format!("peers: {}; {}", machine::first_line("mpirun.openmpi", &["--version"]), mpich_version()),
        format!(
            "f32, {temperature} buffers rewritten before every call, {:?} a unit, {} blocks",
            contest.manner.per_size,
            args.pace.blocks()
        ),
        format!("{} were taken while the machine was not steady", tally.unsteady()),
        format!("placement of cores: {}", contest.placement.describe()),
        format!("load average at the end: {}", load.trim()),
    ];
    let missing = contest.built.missing.iter();
    let left_out = missing.map(|line| format!("left out: {}", line.lines().next().unwrap_or("")));
    args.pace.warning().into_iter().chain(lines).chain(left_out).collect()
}

fn mpich_version() -> String {
    let text = machine::output("mpiexec.mpich", &["--version"]);
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Version:")).unwrap_or(" not found");
    format!("MPICH {}", version.trim())
}

#[cfg(test)]
mod tests {
    use super::super::contest::Contest;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CollectivesArgs,
    }

    fn args(words: &str) -> CollectivesArgs {
        Line::try_parse_from(std::iter::once("bench").chain(words.split_whitespace())).unwrap().args
    }

    #[test]
    fn every_operation_is_measured_at_every_size() {
        let sizes: Vec<u64> =
            cases(&args("--op all-reduce --world 2 --sizes 16,1M")).iter().map(|case| case.bytes).collect();
        assert_eq!(sizes, [16, 1 << 20]);
        assert_eq!(cases(&args("--op barrier --world 2")).len(), 1);
    }

    #[test]
    fn more_ranks_than_two_are_for_all_reduce() {
        let of_four = |words| {
            let of_four = |case: &&Case| case.op == Op("broadcast") && case.world == 4;
            cases(&args(words)).iter().filter(of_four).count()
        };
        assert_eq!(of_four(""), 0);
        assert_eq!(of_four("--op broadcast"), 7);
    }

    #[test]
    fn who_takes_part_is_who_was_asked_for_and_built() {
        let named = |with_ours, peers: &[Peer]| {
            let program = || Some("program".into());
            let built = built::Built {
                ours: program(),
                open_mpi: program(),
                floor: program(),
                ..built::Built::default()
            };
            let placement = Placement::watch("floor".as_ref(), Cores::Any);
            let contest = Calls {
                manner: manner(&args("")),
                placement,
                built,
                peers: peers.to_vec(),
                with_ours,
                cores: 2,
            };
            let case = Case { op: ALL_REDUCE, world: 2, bytes: 16 };
            contest.contenders(case).iter().map(|contender| contender.name).collect::<Vec<_>>()
        };
        assert_eq!(named(false, &[Peer::OpenMpi, Peer::Mpich, Peer::Floor]), ["openmpi", "floor"]);
        // Ours four times: private, heap, TCP, and again as the control.
        assert_eq!(named(true, &[]).len(), 4);
    }
}
