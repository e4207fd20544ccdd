//! `cargo xtask outages`: a cable that is pulled again and again while two hosts train, and what came of it.
//!
//! ```text
//!   data ─▶ a run without outages ─▶ for each way to start and each length: a run with N outages ─▶ findings ─▶ table
//!                  │                                                            │
//!                  └────────────── loss and gradient norm of each step ── equal? ┘
//! ```
//!
//! An outage that the job survives costs time and nothing else. One that is longer than a silent host is waited for ends the
//! job, or restarts it, with an error that names who was lost. Anything else is a finding (`verdict`), and the exit code is 1.
//! The hosts are network namespaces (`rank_test::netns`), so that it needs root.

mod verdict;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rank_test::netns::Hosts;

use crate::bench::{machine, report};
use crate::faults::training::{How, Launcher, Losses, Programs, Recipe, Size, Start, TrainingRun};
use crate::workspace::Workspace;
use verdict::{Expected, Finding, Seen, findings};

/// Steps from one outage to the next.
const BETWEEN: usize = 15;
/// No step, and no end, takes longer than this besides the outage.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long the launcher and ranks wait for a silent host, by default.
const HOST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the launchers of a job that has lost a host for good wait for it to come back; by default 600 s.
const JOIN_TIMEOUT: &str = "--rdzv-conf=join_timeout=20";
/// What is still there so long after the end was left behind.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// How the ranks are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    /// Each rank by hand, without a launcher
    Plain,
    /// `drumline run --max-restarts 0`
    NoRestarts,
    /// `drumline run --max-restarts 3`
    Restarts,
    /// `drumline run --nnodes 1:2`
    Elastic,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Plain => "no launcher",
            Way::NoRestarts => "--max-restarts 0",
            Way::Restarts => "--max-restarts 3",
            Way::Elastic => "--nnodes 1:2",
        }
    }

    fn launcher(self) -> Launcher {
        match self {
            Way::Plain => Launcher::None,
            Way::NoRestarts => Launcher::Fixed { max_restarts: 0 },
            Way::Restarts => Launcher::Fixed { max_restarts: 3 },
            Way::Elastic => Launcher::Elastic,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = clap::ValueEnum::to_possible_value(self);
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Pull the cable between two hosts again and again while they train, and compare with a run without outages (needs root). The
/// exit code is 1 if any run was harmed
#[derive(clap::Args)]
pub(crate) struct OutagesArgs {
    /// Lengths of the outages in seconds; `inf` pulls the cable for good
    #[arg(long, value_name = "SECONDS,...", value_delimiter = ',', default_values_t = [1.0, 2.0, 5.0, 10.0, 20.0])]
    seconds: Vec<f64>,
    /// Outages of each length, in one run
    #[arg(long, value_name = "N", default_value_t = 20)]
    times: usize,
    /// How the ranks are started
    #[arg(long, value_enum, value_name = "WAY,...", value_delimiter = ',',
          default_values_t = [Way::Plain, Way::NoRestarts, Way::Restarts, Way::Elastic])]
    ways: Vec<Way>,
    /// More flags of `drumline run`, such as --host-timeout=5
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    flag: Vec<String>,
    /// Programs that are built already, instead of building them
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Keep the table in bench/results/
    #[arg(long)]
    save: bool,
}

/// What came of the outages of one length.
struct Outcome {
    way: Way,
    length: Length,
    seen: Seen,
    findings: Vec<Finding>,
}

pub(crate) fn run(args: &OutagesArgs) -> Result<ExitCode> {
    let Some(hosts) = Hosts::new(2)? else { bail!("two hosts are needed; try as root") };
    let programs = Programs::find(args.programs.as_deref())?;
    let folder = Workspace::load()?.target_dir.join("outages");
    let size = Size { num_steps: BETWEEN * (args.times + 1), save_every: 10, ranks_per_host: 1 };
    let recipe = Recipe::prepare(programs, &folder, size)?;
    eprintln!("a run without outages, of {} steps ...", recipe.num_steps());
    let reference = undisturbed(&recipe, &hosts)?;
    let mut outcomes = Vec::new();
    for way in &args.ways {
        for seconds in &args.seconds {
            let length = Length::new(*seconds)?;
            eprintln!("{}: {} outages of {length} ...", way.name(), length.times(args));
            let outcome = disturbed(args, &recipe, &hosts, Disturbance { way: *way, length }, &reference)?;
            eprintln!("  {}", outcome.cells().join(" | "));
            outcome.findings.iter().for_each(|finding| eprintln!("  wrong: {finding}"));
            outcomes.push(outcome);
        }
    }
    let text = table(args, &outcomes);
    println!("{text}");
    if args.save {
        let lines = outcomes.iter().map(|outcome| format!("{}\n", outcome.cells().join(",")));
        report::save("outages", &text, &format!("{}\n{}", HEADING.join(","), lines.collect::<String>()))?;
    }
    let is_right = outcomes.iter().all(|outcome| outcome.findings.is_empty());
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn undisturbed(recipe: &Recipe, hosts: &Hosts) -> Result<Vec<String>> {
    let start = Start { name: "undisturbed".to_owned(), launcher: Launcher::None, flags: Vec::new() };
    let mut run = TrainingRun::start(recipe, hosts, start)?;
    run.wait_for_step(recipe.num_steps(), PATIENCE * 4);
    let problems = run.end(PATIENCE);
    let steps = run.steps();
    if steps.len() != recipe.num_steps() {
        bail!(
            "the run without outages ended ({}) after {} steps; see {}",
            problems.join("; "),
            steps.len(),
            run.out().display()
        );
    }
    Ok(steps)
}

/// How the ranks are started, and how long each outage is.
#[derive(Debug, Clone, Copy)]
struct Disturbance {
    way: Way,
    length: Length,
}

impl Disturbance {
    fn expected(self) -> Expected {
        match (self.length, self.way) {
            (Length::Span(span), _) if span < HOST_TIMEOUT => Expected::Nothing,
            (_, Way::Plain | Way::NoRestarts) | (Length::ForGood, Way::Restarts) => Expected::BothFail,
            (Length::Span(_), Way::Restarts) => Expected::BothFinish,
            (_, Way::Elastic) => Expected::FirstFinishes,
        }
    }

    fn flags(self, args: &OutagesArgs) -> Vec<String> {
        let is_waited_for =
            self.length == Length::ForGood && matches!(self.way, Way::Restarts | Way::Elastic);
        args.flag.iter().cloned().chain(is_waited_for.then(|| JOIN_TIMEOUT.to_owned())).collect()
    }
}

/// How long an outage lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Length {
    Span(Duration),
    ForGood,
}

impl Length {
    fn new(seconds: f64) -> Result<Self> {
        if seconds == f64::INFINITY {
            return Ok(Self::ForGood);
        }
        Ok(Self::Span(Duration::try_from_secs_f64(seconds).context("--seconds")?))
    }

    /// How often the cable is pulled: only once if that ends the job or makes it start over.
    fn times(self, args: &OutagesArgs) -> usize {
        match self {
            Self::Span(span) if span < HOST_TIMEOUT => args.times,
            Self::Span(_) | Self::ForGood => 1,
        }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Span(span) => write!(f, "{} s", span.as_secs_f64()),
            Self::ForGood => f.write_str("for good"),
        }
    }
}

fn disturbed(
    args: &OutagesArgs,
    recipe: &Recipe,
    hosts: &Hosts,
    disturbance: Disturbance,
    reference: &[String],
) -> Result<Outcome> {
    let Disturbance { way, length } = disturbance;
    let name = format!("{way}-{length}").replace(' ', "-");
    let start = Start { name, launcher: way.launcher(), flags: disturbance.flags(args) };
    let mut run = TrainingRun::start(recipe, hosts, start)?;
    let mut outages = 0;
    let asked = length.times(args);
    while outages < asked && run.wait_for_step(BETWEEN * (outages + 1), PATIENCE) {
        match length {
            Length::Span(span) => hosts.outage(1, span)?,
            Length::ForGood => hosts.cut(1)?,
        }
        outages += 1;
    }
    run.wait_for_step(recipe.num_steps(), PATIENCE);
    let ends = run.ends(PATIENCE);
    if length == Length::ForGood {
        hosts.restore(1)?;
    }
    let seen = Seen {
        asked,
        outages,
        restarts: run.restarts(),
        processes: run.processes(),
        steps_lost: run.steps_lost(),
        losses: Losses::compare(&run.steps(), reference),
        ends,
        left: run.left_behind(GONE_WITHIN),
    };
    Ok(Outcome { way, length, findings: findings(&seen, disturbance.expected()), seen })
}

const HEADING: [&str; 9] = [
    "way",
    "outage",
    "times",
    "restarts",
    "processes besides the first two",
    "steps lost",
    "losses",
    "end",
    "left behind",
];

impl Outcome {
    fn cells(&self) -> Vec<String> {
        let Self { way, length, seen, findings: _ } = self;
        let Seen { asked: _, outages, restarts, processes, steps_lost, losses, ends, left } = seen;
        let all = |list: &[String], none: &str| {
            if list.is_empty() { none.to_owned() } else { list.join("; ").replace([',', '|', '\n'], ";") }
        };
        let ends: Vec<String> = if ends.iter().all(|end| end.how == How::Succeeded) {
            Vec::new()
        } else {
            ends.iter().map(ToString::to_string).collect()
        };
        let counts = [outages, restarts, processes, steps_lost].map(|count| count.to_string());
        let mut cells = vec![way.name().to_owned(), length.to_string()];
        cells.extend(counts);
        cells.extend([losses.to_string(), all(&ends, "both exit 0"), all(left, "nothing")]);
        cells
    }
}

/// One line for each finding.
fn conclusion(outcomes: &[Outcome]) -> String {
    let wrong = outcomes.iter().flat_map(|Outcome { way, length, findings, .. }| {
        let name = format!("{}, {length}", way.name());
        findings.iter().map(move |finding| format!("- **{name}**: {finding}\n"))
    });
    let wrong: String = wrong.collect();
    if wrong.is_empty() { "Nothing is wrong.\n".to_owned() } else { format!("Wrong:\n\n{wrong}") }
}

fn table(args: &OutagesArgs, outcomes: &[Outcome]) -> String {
    let heading = HEADING.map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(heading).chain(outcomes.iter().map(Outcome::cells)).collect();
    let flags = if args.flag.is_empty() { String::new() } else { format!(" {}", args.flag.join(" ")) };
    format!(
        "# Outages in the middle of training\n\n{}, {}. Two hosts (network namespaces), one rank each, \
         `config/gpt-tiny.yaml`, flags:{flags}. Made by `cargo xtask outages --times {}`. \
         Losses are those of {} steps, compared bit by bit with a run without outages.\n\n{}\n{}",
        machine::today(),
        machine::describe(),
        args.times,
        BETWEEN * (args.times + 1),
        report::table(&rows),
        conclusion(outcomes)
    )
}
