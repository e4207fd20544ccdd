//! `cargo xtask bench collectives`: reads the wishes, runs every unit behind the gate, writes the results.

use super::contender::{self, Case, Contender, Manner, Op, Peer};
use super::placement::{Cores, Placement};
use super::progress::Progress;
use super::schedule::order;
use super::session::{Session, Unit};
use super::sizes::ByteSize;
use super::tally::Tally;
use super::{machine, peers, report};
use crate::workspace;
use anyhow::Context;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
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
    /// How often everything is repeated
    #[arg(long, default_value_t = 5)]
    blocks: usize,
    /// Seconds of measuring per unit
    #[arg(long, default_value_t = 0.4)]
    seconds_per_size: f64,
    /// One short block, to see that everything works; its figures are no result
    #[arg(long)]
    quick: bool,
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
    /// Longest wait of a unit for a quiet machine and the wanted placement, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
}

/// Builds, measures, judges, writes.
pub(crate) fn run(args: &CollectivesArgs) -> anyhow::Result<()> {
    let built = peers::build(&args.peers, !args.no_ours)?;
    built.missing.iter().for_each(|line| eprintln!("left out: {line}\n"));
    let floor =
        built.floor.clone().context("the floor program is the probe of every unit and was not built")?;
    let plan = plan(args, machine::cores());
    eprintln!("{} units; watching how the host places our cores ...", plan.len());
    let mut session = Session {
        manner: manner(args),
        patience: patience(args),
        placement: Placement::watch(&floor, args.cores),
        built,
        tally: Tally::default(),
        failures: BTreeMap::new(),
    };
    let mut progress = Progress::new(plan.len());
    for (done, unit) in plan.iter().enumerate() {
        progress.show(done, unit);
        session.take(unit);
    }
    progress.clear();
    write(args, &session)
}

fn manner(args: &CollectivesArgs) -> Manner {
    let seconds = if args.quick { args.seconds_per_size.min(0.05) } else { args.seconds_per_size };
    Manner { per_size: Duration::from_secs_f64(seconds), cold: args.cold }
}

fn patience(args: &CollectivesArgs) -> Duration {
    Duration::from_secs(if args.quick { args.patience.min(2) } else { args.patience })
}

/// Every unit in the order of running: block by block, size by size, contenders side by side.
fn plan(args: &CollectivesArgs, cores: usize) -> Vec<Unit> {
    let mut units = Vec::new();
    for block in 0..if args.quick { 1 } else { args.blocks } {
        for (op, world) in pairs(args) {
            let contenders = contenders(args, op, world, cores);
            let sizes = if op == Op::Barrier { vec![ByteSize(0)] } else { args.sizes.clone() };
            for ByteSize(bytes) in sizes {
                let case = Case { op, world, bytes };
                let in_order = order(contenders.len(), block).into_iter();
                units.extend(in_order.map(|i| Unit { block, case, contender: contenders[i].clone() }));
            }
        }
    }
    units
}

/// More ranks than two are a matter of the all-reduce goals; of others only when they are asked for alone.
fn pairs(args: &CollectivesArgs) -> Vec<(Op, usize)> {
    let alone = args.op.len() == 1;
    let all = args.op.iter().flat_map(|op| args.world.iter().map(|world| (*op, *world)));
    all.filter(|(op, world)| alone || *op == Op::AllReduce || *world == 2).collect()
}

fn contenders(args: &CollectivesArgs, op: Op, world: usize, cores: usize) -> Vec<Contender> {
    let ours = if args.no_ours { Vec::new() } else { contender::ours(op, world) };
    let theirs = args.peers.iter().flat_map(|peer| contender::of_peer(*peer, op, world, cores));
    ours.into_iter().chain(theirs).collect()
}

fn write(args: &CollectivesArgs, session: &Session) -> anyhow::Result<()> {
    let text = report::markdown(&session.tally, &about(args, session));
    let base = free_name(args.quick)?;
    for (ending, content) in [("md", text.clone()), ("csv", report::csv(&session.tally))] {
        let path = base.with_extension(ending);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written: {}", path.display());
    }
    print!("{text}");
    Ok(())
}

/// `bench/results/<date>-collectives`, with a number when the day has one already.
fn free_name(quick: bool) -> anyhow::Result<PathBuf> {
    let folder = workspace::root().join("bench/results");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let stem = format!("{}-collectives{}", machine::today(), if quick { "-quick" } else { "" });
    let named = |n: usize| folder.join(if n == 1 { stem.clone() } else { format!("{stem}-{n}") });
    let free = (1..).map(named).find(|base| quick || !base.with_extension("md").exists());
    free.context("no free name for the results")
}

fn about(args: &CollectivesArgs, session: &Session) -> Vec<String> {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let unsteady = session.tally.samples().filter(|(_, sample)| !sample.steady).count();
    let (temperature, samples) = (if args.cold { "cold" } else { "hot" }, session.tally.samples().count());
    let mut lines = vec![
        machine::describe(),
        format!("peers: {}; {}", machine::first_line("mpirun.openmpi", &["--version"]), mpich_version()),
        format!(
            "f32, {temperature} buffers rewritten before every call, {:?} a unit, {} blocks",
            session.manner.per_size,
            if args.quick { 1 } else { args.blocks }
        ),
        format!("{unsteady} of {samples} samples were taken while the machine was not steady"),
        format!("placement of cores: {}", session.placement.describe()),
        format!("load average at the end: {}", load.trim()),
    ];
    if args.quick {
        lines.insert(0, "**quick run: shows that everything works; its figures are no result**".to_owned());
    }
    lines.extend(
        session.built.missing.iter().map(|line| format!("left out: {}", line.lines().next().unwrap_or(""))),
    );
    lines.extend(session.failures.keys().map(|who| format!("failed: {who}")));
    lines
}

fn mpich_version() -> String {
    let text = machine::output("mpiexec.mpich", &["--version"]);
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Version:")).unwrap_or(" not found");
    format!("MPICH {}", version.trim())
}

#[cfg(test)]
mod tests {
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
    fn a_block_holds_every_contender_at_every_size() {
        let args = args("--op all-reduce --world 2 --sizes 16,1M --blocks 2");
        let units = plan(&args, 2);
        let per_size = units.iter().filter(|u| u.block == 0 && u.case.bytes == 16).count();
        // Ours four times (private, heap, TCP, again), five peers.
        assert_eq!((per_size, units.len()), (9, 9 * 2 * 2));
    }

    #[test]
    fn more_ranks_than_two_are_for_all_reduce() {
        let worlds =
            |words| pairs(&args(words)).iter().filter(|(op, w)| *op == Op::Broadcast && *w == 4).count();
        assert_eq!(worlds(""), 0);
        assert_eq!(worlds("--op broadcast"), 1);
    }

    #[test]
    fn without_ours_only_peers_run() {
        let units =
            plan(&args("--no-ours --quick --peers ompi,floor --op all-reduce --world 2 --sizes 16"), 2);
        assert_eq!(units.iter().map(|u| u.contender.series).collect::<Vec<_>>(), ["openmpi", "floor"]);
    }
}
