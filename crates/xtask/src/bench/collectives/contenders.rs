//! Who takes part, and the command line of each for one unit.
//!
//! Where a peer has several good settings and none is best everywhere, each setting runs on its own and the better one
//! counts, size by size.

use super::built::Built;
use super::sizes::ByteSize;
use crate::bench::contender::Contender;
use crate::bench::contest::Unit;
use std::convert::Infallible;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

/// An operation's name, as `drumline bench` and the peers' programs spell it. Those who run it know which there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Op(pub(crate) &'static str);

pub(crate) const ALL_REDUCE: Op = Op("all-reduce");
pub(crate) const BARRIER: Op = Op("barrier");

impl FromStr for Op {
    type Err = Infallible;

    /// Keeps the name for as long as the program runs.
    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(Self(name.to_owned().leak()))
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// How a contender is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
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

const fn contender(name: &'static str, setting: &'static str, kind: Kind) -> Contender<Kind> {
    Contender { name, setting, kind }
}

/// Ours at one operation: `ours-again` is the control, the same thing measured twice.
pub(crate) fn ours(op: Op, world: usize) -> Vec<Contender<Kind>> {
    let ours = |name, args| contender(name, "", Kind::Ours(args));
    let private = &["--memory", "private", "--transport", "auto"];
    let mut all = vec![ours(OURS_PRIVATE, private)];
    if op == ALL_REDUCE {
        all.push(ours(OURS_HEAP, &["--memory", "heap", "--transport", "auto"]));
    }
    if op == ALL_REDUCE && world == 2 {
        all.push(ours(OURS_TCP, &["--memory", "private", "--transport", "tcp"]));
        all.push(ours(OURS_AGAIN, private));
    }
    all
}

/// A peer's contenders at one operation; none where it has nothing to say.
pub(crate) fn of_peer(peer: Peer, op: Op, world: usize, cores: usize) -> Vec<Contender<Kind>> {
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
        Peer::Floor if op == ALL_REDUCE => vec![contender("floor", "", Kind::Floor)],
        Peer::Socket if op == ALL_REDUCE && world == 2 => vec![contender("socket", "", Kind::Socket)],
        Peer::Floor | Peer::Socket => Vec::new(),
    }
}

/// The command of one unit; `None` when what it needs could not be built.
pub(crate) fn command(unit: &Unit<Case, Kind>, manner: Manner, built: &Built) -> Option<Command> {
    let Case { op, world, bytes } = unit.case;
    let world = world.to_string();
    let mut command = match unit.contender.kind {
        Kind::Ours(args) => {
            let mut command = Command::new(built.ours.as_ref()?);
            command.args(["bench", op.0, "--nproc-per-node", &world, "--dtype", "f32", "--json"]).args(args);
            command
        }
        Kind::OpenMpi(args) => {
            let mut command = Command::new("mpirun.openmpi");
            command.args(["--allow-run-as-root", "-n", &world]).args(args);
            after(command, built.open_mpi.as_deref()?, op)
        }
        Kind::Mpich(args) => {
            let mut command = Command::new("mpiexec.mpich");
            command.args(["-n", &world]).args(args);
            after(command, built.mpich.as_deref()?, op)
        }
        Kind::Gloo => {
            let mut command = Command::new(built.python.as_ref()?);
            command.arg(&built.gloo_script).arg(built.meter.as_ref()?);
            command.args([op.0, "--world", &world]);
            command
        }
        Kind::Floor => started(built.floor.as_deref()?, &["all-reduce", "--world", &world]),
        Kind::Socket => started(built.socket.as_deref()?, &["exchange"]),
    };
    command.args(["--sizes", &bytes.to_string()]);
    command.args(["--seconds-per-size", &manner.per_size.as_secs_f64().to_string()]);
    if manner.cold {
        command.arg("--cold");
    }
    if !matches!(unit.contender.kind, Kind::Ours(_)) {
        command.args(["--deadline", &manner.deadline().as_secs().to_string()]);
    }
    Some(command)
}

fn after(mut starter: Command, program: &Path, op: Op) -> Command {
    starter.arg(program).arg(op.0);
    starter
}

fn started(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x{} {}", self.op, self.world, ByteSize(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(contender: Contender<Kind>, op: Op) -> String {
        let built = Built { ours: Some("drumline".into()), floor: Some("floor".into()), ..Built::default() };
        let manner = Manner { per_size: Duration::from_millis(400), cold: false };
        let unit = Unit { case: Case { op, world: 2, bytes: 4096 }, contender };
        let command = command(&unit, manner, &built).unwrap();
        command.get_args().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ours_is_asked_as_the_contract_says() {
        assert_eq!(
            words(ours(ALL_REDUCE, 2)[1], ALL_REDUCE),
            "bench all-reduce --nproc-per-node 2 --dtype f32 --json --memory heap --transport auto \
             --sizes 4096 --seconds-per-size 0.4"
        );
    }

    #[test]
    fn what_is_not_built_has_no_command() {
        let manner = Manner { per_size: Duration::from_secs(1), cold: false };
        let case = Case { op: ALL_REDUCE, world: 2, bytes: 16 };
        for peer in [Peer::OpenMpi, Peer::Mpich, Peer::Gloo, Peer::Floor, Peer::Socket] {
            let unit = Unit { case, contender: of_peer(peer, case.op, 2, 2)[0] };
            assert!(command(&unit, manner, &Built::default()).is_none());
        }
    }

    #[test]
    fn more_ranks_than_cores_bring_more_settings() {
        assert_eq!(of_peer(Peer::OpenMpi, ALL_REDUCE, 2, 2).len(), 1);
        assert_eq!(of_peer(Peer::OpenMpi, ALL_REDUCE, 4, 2).len(), 2);
        assert!(of_peer(Peer::Socket, ALL_REDUCE, 4, 2).is_empty());
    }
}
