//! `cargo xtask soak`: random faults in training over two hosts, run after run, and every run held against one without.
//!
//! ```text
//!   data ─▶ a run without faults ─▶ Reference
//!   (seed, run number) ─draw─▶ faults ─disturb─▶ what was seen ─verdict─▶ findings; run after run, while there is time
//! ```
//!
//! The hosts are network namespaces, with an agent of `drumline run` on each, so that it needs root. A run with findings
//! keeps its folder, and can be had again by its seed and number.

mod disturb;
mod draw;
mod tally;
mod verdict;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rank_test::netns::Hosts;

use crate::bench::report;
use crate::faults::training::{Programs, Recipe, Size};
use crate::workspace::Workspace;
use disturb::disturb;
use draw::{Draw, Ground, draw};
use tally::{Outcome, Tally};
use verdict::{Reference, findings};

const NUM_STEPS: usize = 40;
const SAVE_EVERY: usize = 4;

/// Train on two hosts under random faults, run after run, and compare each with a run without faults (needs root)
#[derive(clap::Args)]
pub(crate) struct SoakArgs {
    /// No run begins after so many minutes
    #[arg(long, value_name = "N", default_value_t = 60.0)]
    minutes: f64,
    /// No more runs than these
    #[arg(long, value_name = "N")]
    runs: Option<usize>,
    /// What the faults are drawn from; the time by default
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Number of the first run, to have one again
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_run: u64,
    /// Ranks on each of the two hosts
    #[arg(long, value_name = "N", default_value_t = 1)]
    nproc_per_node: usize,
    /// Programs that are built already, instead of building them
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Keep the table in bench/results/
    #[arg(long)]
    save: bool,
}

pub(crate) fn run(args: &SoakArgs) -> Result<ExitCode> {
    let length = Duration::try_from_secs_f64(args.minutes * 60.0).context("--minutes")?;
    let soak = Soak::prepare(args)?;
    let seed = args.seed.unwrap_or_else(seed_of_now);
    let mut tally = Tally::new(seed, args.nproc_per_node);
    eprintln!("seed {seed}; a run without faults, of {NUM_STEPS} steps ...");
    let reference = soak.undisturbed()?;
    let began = Instant::now();
    for run in (args.first_run..).take(args.runs.unwrap_or(usize::MAX)) {
        if began.elapsed() >= length {
            break;
        }
        let outcome = soak.disturbed(seed, run, &reference)?;
        eprintln!("{:5.1} of {} min, {}", began.elapsed().as_secs_f64() / 60.0, args.minutes, outcome);
        tally.add(outcome);
    }
    let text = tally.markdown(began.elapsed());
    println!("{text}");
    if args.save {
        report::save("soak", &text, &tally.csv())?;
    }
    Ok(if tally.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Different each time.
fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// What all runs share.
struct Soak {
    hosts: Hosts,
    recipe: Recipe,
    ground: Ground,
    folder: PathBuf,
}

impl Soak {
    fn prepare(args: &SoakArgs) -> Result<Self> {
        let ranks_per_host = args.nproc_per_node;
        ensure!(ranks_per_host > 0, "each host must have a rank; try --nproc-per-node 1");
        let Some(hosts) = Hosts::new(2)? else { bail!("two hosts are needed; try as root") };
        let folder = Workspace::load()?.target_dir.join("soak");
        let size = Size { num_steps: NUM_STEPS, save_every: SAVE_EVERY, ranks_per_host };
        let programs = Programs::find(args.programs.as_deref())?;
        let recipe = Recipe::prepare(programs, &folder.join("runs"), size)?;
        Ok(Self { hosts, recipe, ground: Ground { num_steps: NUM_STEPS, ranks_per_host }, folder })
    }

    fn undisturbed(&self) -> Result<Reference> {
        let run = disturb(&self.recipe, &self.hosts, "undisturbed", &Draw::default())?;
        let folder = self.recipe.run_folder("undisturbed");
        let problems = run.seen.ends.iter().chain(&run.seen.left).cloned().collect::<Vec<_>>();
        ensure!(problems.is_empty(), "without faults: {}; see {}", problems.join("; "), folder.display());
        let weights = run.seen.weights.with_context(|| format!("no weights in {}", folder.display()))?;
        let (steps, files) = (run.seen.steps, run.seen.files);
        ensure!(steps.len() == NUM_STEPS, "{} steps without faults; see {}", steps.len(), folder.display());
        Ok(Reference { steps, weights, files })
    }

    fn disturbed(&self, seed: u64, run: u64, reference: &Reference) -> Result<Outcome> {
        let (draw, name) = (draw(seed, run, self.ground), format!("run-{run}"));
        let disturbed = disturb(&self.recipe, &self.hosts, &name, &draw)?;
        let findings = findings(&disturbed.seen, reference);
        let folder = self.recipe.run_folder(&name);
        let kept = if findings.is_empty() {
            fs::remove_dir_all(folder)?;
            None
        } else {
            let kept = self.folder.join(format!("wrong-{seed}-{run}"));
            // One that was had before.
            let _ = fs::remove_dir_all(&kept);
            fs::rename(folder, &kept)?;
            fs::write(kept.join("faults.txt"), draw.to_string())?;
            Some(kept)
        };
        let num_drawn = draw.faults.len() + draw.acts.len();
        let disturb::Disturbed { seen, span } = disturbed;
        Ok(Outcome { run, num_drawn, kinds: seen.kinds, restarts: seen.restarts, span, findings, kept })
    }
}
