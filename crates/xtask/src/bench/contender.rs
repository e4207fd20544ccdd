//! Who takes part, and the command line of each for one unit.
//!
//! A *series* is a column of the table (`ours-heap`, `openmpi`, …). Where a peer has several good settings and none is
//! best everywhere, each setting runs on its own and the better one counts, size by size.

use super::peers::Built;
use super::sizes::ByteSize;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// An operation, spelled as by `drumline bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Op {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    Gather,
    ReduceScatter,
    Scatter,
    AllToAll,
    Barrier,
    SendRecv,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all-reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all-gather",
            Self::Gather => "gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Scatter => "scatter",
            Self::AllToAll => "all-to-all",
            Self::Barrier => "barrier",
            Self::SendRecv => "send-recv",
        })
    }
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) world: usize,
    pub(crate) bytes: u64,
}

/// The peers that can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Peer {
    #[value(name = "ompi")]
    OpenMpi,
    Mpich,
    Gloo,
    Floor,
    Socket,
}

/// One who is measured.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Contender {
    pub(crate) series: &'static str,
    pub(crate) setting: &'static str,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq)]
enum Kind {
    /// Further arguments of `drumline bench`
    Ours(&'static [&'static str]),
    /// Arguments of the starter, before the program
    OpenMpi(&'static [&'static str]),
    Mpich(&'static [&'static str]),
    Gloo,
    Floor,
    Socket,
}

/// How long and how a unit measures.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    pub(crate) per_size: Duration,
    pub(crate) cold: bool,
}

impl Manner {
    /// Enough for a start, the least number of turns and a slow machine.
    pub(crate) fn deadline(self) -> Duration {
        Duration::from_secs(60) + self.per_size * 10
    }
}

pub(crate) const OURS_PRIVATE: &str = "ours-private";
pub(crate) const OURS_AGAIN: &str = "ours-again";
pub(crate) const OURS_HEAP: &str = "ours-heap";
pub(crate) const OURS_TCP: &str = "ours-tcp";

const fn contender(series: &'static str, setting: &'static str, kind: Kind) -> Contender {
    Contender { series, setting, kind }
}

/// Ours at one operation: `ours-again` is the control, the same thing measured twice.
pub(crate) fn ours(op: Op, world: usize) -> Vec<Contender> {
    let ours = |series, args| contender(series, "", Kind::Ours(args));
    let private = &["--memory", "private", "--transport", "auto"];
    let mut all = vec![ours(OURS_PRIVATE, private)];
    if op == Op::AllReduce {
        all.push(ours(OURS_HEAP, &["--memory", "heap", "--transport", "auto"]));
    }
    if op == Op::AllReduce && world == 2 {
        all.push(ours(OURS_TCP, &["--memory", "private", "--transport", "tcp"]));
        all.push(ours(OURS_AGAIN, private));
    }
    all
}

/// A peer's contenders at one operation; none where it has nothing to say.
pub(crate) fn of_peer(peer: Peer, op: Op, world: usize, cores: usize) -> Vec<Contender> {
    let crowded = world > cores;
    match peer {
        Peer::OpenMpi if crowded => vec![
            contender("openmpi", "oversubscribe", Kind::OpenMpi(&["--oversubscribe"])),
            contender(
                "openmpi",
                "oversubscribe, yield when idle",
                Kind::OpenMpi(&["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]),
            ),
        ],
        Peer::OpenMpi => vec![contender("openmpi", "bound to cores", Kind::OpenMpi(&["--bind-to", "core"]))],
        Peer::Mpich if crowded => vec![
            contender("mpich", "default", Kind::Mpich(&[])),
            contender("mpich", "yield early", Kind::Mpich(&["-genv", "MPIR_CVAR_POLLS_BEFORE_YIELD", "1"])),
        ],
        Peer::Mpich => vec![contender("mpich", "bound to cores", Kind::Mpich(&["-bind-to", "core"]))],
        Peer::Gloo => vec![contender("gloo", "loopback, 1 thread", Kind::Gloo)],
        Peer::Floor if op == Op::AllReduce => vec![contender("floor", "", Kind::Floor)],
        Peer::Socket if op == Op::AllReduce && world == 2 => vec![contender("socket", "", Kind::Socket)],
        Peer::Floor | Peer::Socket => Vec::new(),
    }
}

impl Contender {
    /// The series that a record belongs to: a peer's program may measure more than one.
    pub(crate) fn series_of(&self, backend: &str) -> String {
        let name = if matches!(self.kind, Kind::Ours(_)) { self.series } else { backend };
        name.to_owned()
    }

    /// The command of one unit; `None` when what it needs could not be built.
    pub(crate) fn command(&self, case: Case, manner: Manner, built: &Built) -> Option<Command> {
        let world = case.world.to_string();
        let mut command = match &self.kind {
            Kind::Ours(args) => {
                let mut command = Command::new(built.ours.as_ref()?);
                command.args([
                    "bench",
                    &case.op.to_string(),
                    "--nproc-per-node",
                    &world,
                    "--dtype",
                    "f32",
                    "--json",
                ]);
                command.args(*args);
                command
            }
            Kind::OpenMpi(args) => {
                let mut command = Command::new("mpirun.openmpi");
                command.args(["--allow-run-as-root", "-n", &world]).args(*args);
                after(command, built.open_mpi.as_deref()?, case.op)
            }
            Kind::Mpich(args) => {
                let mut command = Command::new("mpiexec.mpich");
                command.args(["-n", &world]).args(*args);
                after(command, built.mpich.as_deref()?, case.op)
            }
            Kind::Gloo => {
                let mut command = Command::new(built.python.as_ref()?);
                command.arg(&built.gloo_script).arg(built.meter.as_ref()?);
                command.args([&case.op.to_string(), "--world", &world]);
                command
            }
            Kind::Floor => started(built.floor.as_deref()?, &["all-reduce", "--world", &world]),
            Kind::Socket => started(built.socket.as_deref()?, &["exchange"]),
        };
        command.args(["--sizes", &case.bytes.to_string()]);
        command.args(["--seconds-per-size", &manner.per_size.as_secs_f64().to_string()]);
        if manner.cold {
            command.arg("--cold");
        }
        if !matches!(self.kind, Kind::Ours(_)) {
            command.args(["--deadline", &manner.deadline().as_secs().to_string()]);
        }
        Some(command)
    }
}

fn after(mut starter: Command, program: &Path, op: Op) -> Command {
    starter.arg(program).arg(op.to_string());
    starter
}

fn started(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setting = if self.setting.is_empty() { String::new() } else { format!(" ({})", self.setting) };
        write!(f, "{}{setting}", self.series)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x{} {}", self.op, self.world, ByteSize(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(contender: &Contender, op: Op) -> String {
        let built = Built { ours: Some("drumline".into()), floor: Some("floor".into()), ..Built::default() };
        let manner = Manner { per_size: Duration::from_millis(400), cold: false };
        let command = contender.command(Case { op, world: 2, bytes: 4096 }, manner, &built).unwrap();
        command.get_args().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ours_is_asked_as_the_contract_says() {
        assert_eq!(
            words(&ours(Op::AllReduce, 2)[1], Op::AllReduce),
            "bench all-reduce --nproc-per-node 2 --dtype f32 --json --memory heap --transport auto \
             --sizes 4096 --seconds-per-size 0.4"
        );
    }

    #[test]
    fn what_is_not_built_has_no_command() {
        let manner = Manner { per_size: Duration::from_secs(1), cold: false };
        let case = Case { op: Op::AllReduce, world: 2, bytes: 16 };
        for peer in [Peer::OpenMpi, Peer::Mpich, Peer::Gloo, Peer::Floor, Peer::Socket] {
            assert!(of_peer(peer, case.op, 2, 2)[0].command(case, manner, &Built::default()).is_none());
        }
    }

    #[test]
    fn more_ranks_than_cores_bring_more_settings() {
        assert_eq!(of_peer(Peer::OpenMpi, Op::AllReduce, 2, 2).len(), 1);
        assert_eq!(of_peer(Peer::OpenMpi, Op::AllReduce, 4, 2).len(), 2);
        assert!(of_peer(Peer::Socket, Op::AllReduce, 4, 2).is_empty());
    }
}
