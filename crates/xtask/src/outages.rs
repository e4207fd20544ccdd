//! `cargo xtask outages`: a cable that is pulled again and again while two hosts train, and what came of it.
//!
//! ```text
//!   data ─▶ a run without outages ─▶ for each way to start and each length: a run with N outages ─▶ table
//!                  │                                                            │
//!                  └────────────── loss and gradient norm of each step ── equal? ┘
//! ```
//!
//! The hosts are network namespaces (`rank_test::netns`), so that it needs root. Both ranks have one thread: the bits of a
//! step do not depend on the machine's load.

mod training;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rank_test::netns::Hosts;

use crate::bench::{build_package, machine, report};
use crate::workspace::{self, Workspace};
use training::{Course, Losses, Programs, Training, Way};

/// Steps from one outage to the next.
const BETWEEN: usize = 15;
/// No step, and no end, takes longer than this besides the outage.
const PATIENCE: Duration = Duration::from_secs(90);

/// Pull the cable between two hosts again and again while they train, and compare with a run without outages (needs root)
#[derive(clap::Args)]
pub(crate) struct OutagesArgs {
    /// Lengths of the outages in seconds
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
    span: Duration,
    outages: usize,
    restarts: usize,
    processes: usize,
    steps_lost: usize,
    losses: Losses,
    end: String,
}

pub(crate) fn run(args: &OutagesArgs) -> Result<()> {
    let Some(hosts) = Hosts::new(2)? else { bail!("two hosts are needed; try as root") };
    let programs = programs(args)?;
    let folder = Workspace::load()?.target_dir.join("outages");
    let course = Course::prepare(&programs, &folder, BETWEEN * (args.times + 1))?;
    eprintln!("a run without outages, of {} steps ...", course.num_steps);
    let reference = undisturbed(&course, &hosts)?;
    let mut outcomes = Vec::new();
    for way in &args.ways {
        for seconds in &args.seconds {
            let span = Duration::try_from_secs_f64(*seconds).context("--seconds")?;
            eprintln!("{}: {} outages of {span:?} ...", way.name(), args.times);
            let outcome = disturbed(args, &course, &hosts, (*way, span), &reference)?;
            eprintln!("  {}", outcome.cells().join(" | "));
            outcomes.push(outcome);
        }
    }
    let text = table(args, &outcomes);
    println!("{text}");
    if args.save {
        let lines = outcomes.iter().map(|outcome| format!("{}\n", outcome.cells().join(",")));
        report::save("outages", &text, &format!("{}\n{}", HEADING.join(","), lines.collect::<String>()))?;
    }
    Ok(())
}

fn programs(args: &OutagesArgs) -> Result<Programs> {
    let built = |package: &str, binary: &str| match &args.programs {
        Some(folder) => folder.join(binary).canonicalize().with_context(|| format!("no {binary} there")),
        None => build_package(package, binary),
    };
    Ok(Programs {
        drumline: built("drumline-cli", "drumline")?,
        train: built("drumline-zoo", "drumline-train")?,
    })
}

fn undisturbed(course: &Course<'_>, hosts: &Hosts) -> Result<Vec<String>> {
    let mut training = Training::start(course, hosts, Way::Plain, &[])?;
    training.wait_for_step(course.num_steps, PATIENCE * 4);
    let end = training.end(PATIENCE);
    let steps = training.steps();
    if steps.len() != course.num_steps {
        bail!(
            "the run without outages ended ({end}) after {} steps; see {}",
            steps.len(),
            training.out().display()
        );
    }
    Ok(steps)
}

fn disturbed(
    args: &OutagesArgs,
    course: &Course<'_>,
    hosts: &Hosts,
    (way, span): (Way, Duration),
    reference: &[String],
) -> Result<Outcome> {
    let mut training = Training::start(course, hosts, way, &args.flag)?;
    let mut outages = 0;
    while outages < args.times && training.wait_for_step(BETWEEN * (outages + 1), PATIENCE) {
        hosts.outage(1, span)?;
        outages += 1;
    }
    training.wait_for_step(course.num_steps, PATIENCE);
    let end = training.end(PATIENCE);
    Ok(Outcome {
        way,
        span,
        outages,
        restarts: training.restarts(),
        processes: training.processes(),
        steps_lost: training.steps_lost(),
        losses: Losses::compare(&training.steps(), reference),
        end,
    })
}

const HEADING: [&str; 8] =
    ["way", "outage", "times", "restarts", "processes besides the first two", "steps lost", "losses", "end"];

impl Outcome {
    fn cells(&self) -> Vec<String> {
        let Self { way, span, outages, restarts, processes, steps_lost, losses, end } = self;
        let counts = [restarts, processes, steps_lost].map(|count| count.to_string());
        let mut cells = vec![way.name().to_owned(), format!("{} s", span.as_secs_f64()), outages.to_string()];
        cells.extend(counts);
        cells.extend([losses.to_string(), end.replace([',', '|', '\n'], ";")]);
        cells
    }
}

fn table(args: &OutagesArgs, outcomes: &[Outcome]) -> String {
    let heading = HEADING.map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(heading).chain(outcomes.iter().map(Outcome::cells)).collect();
    let flags = if args.flag.is_empty() { String::new() } else { format!(" {}", args.flag.join(" ")) };
    format!(
        "# Outages in the middle of training\n\n{}, {}. Two hosts (network namespaces), one rank each, \
         `config/gpt-tiny.yaml`, flags:{flags}. Made by `cargo xtask outages --times {}`. \
         Losses are those of {} steps, compared bit by bit with a run without outages.\n\n{}",
        machine::today(),
        machine::describe(),
        args.times,
        BETWEEN * (args.times + 1),
        report::table(&rows)
    )
}

/// Where configurations are.
fn config(name: &str) -> PathBuf {
    workspace::root().join("config").join(name)
}
