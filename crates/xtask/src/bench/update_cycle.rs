//! `cargo xtask bench update-cycle`: the experiment of NJUNMT's users. Ranks and update cycles of the same total batch, on a translation task: the loss must be
//! the same, the speed should not.
//!
//! ```text
//!   1 rank × 4 batches, 2 × 2, 4 × 1 ─▶ metrics.jsonl, TensorBoard ─▶ losses compared, docs/images/update-cycle-*.svg
//! ```

use anyhow::{Context, ensure};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::report::{self, row};
use super::spread::median;
use super::{build, child, machine, quiet};
use crate::workspace;

/// How many ranks share a step, and how many batches each of them takes.
#[derive(Debug, Clone, Copy)]
struct World {
    ranks: usize,
    cycle: usize,
}

const WORLDS: [World; 3] =
    [World { ranks: 1, cycle: 4 }, World { ranks: 2, cycle: 2 }, World { ranks: 4, cycle: 1 }];
/// Tokens of a batch: a step has four.
const TOKENS: usize = 512;
const LIMIT: Duration = Duration::from_secs(1200);
/// Relative, of a step's loss, in the first steps: sums are rounded in another order, and a training multiplies what that changes.
const MOST_DIFFERENCE: f64 = 1e-3;
/// Steps that are held against it.
const FIRST: usize = 100;

/// Train the same batches with 1, 2 and 4 ranks, compare losses, and draw loss and speed
#[derive(clap::Args, Debug)]
pub(crate) struct UpdateCycleArgs {
    /// Epochs of each training
    #[arg(long, default_value_t = 4)]
    epochs: usize,
    /// Longest wait for a quiet machine, in seconds
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Keep the results in bench/results/ and the pictures in docs/images/
    #[arg(long)]
    save: bool,
}

/// What a training has written.
struct Trained {
    world: World,
    log: PathBuf,
    losses: Vec<f64>,
    per_s: f64,
    bleu: f64,
}

/// Builds, trains, compares, draws.
pub(crate) fn run(args: &UpdateCycleArgs) -> anyhow::Result<()> {
    let [drumline, _train] = build::release([build::DRUMLINE, build::DRUMLINE_TRAIN])?;
    let folder = build::output_folder()?.join("update-cycle");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let data = folder.join("data");
    let mut synth = Command::new(&drumline);
    synth.args(["data", "synth-translation", "--out"]).arg(&data);
    child::run(synth, LIMIT)?;
    let mut trained = Vec::new();
    for world in WORLDS {
        let World { ranks, cycle } = world;
        let steady = quiet::wait(Duration::from_secs(args.patience));
        let state = if steady { "quiet" } else { "not quiet" };
        eprintln!("== {ranks} ranks, {cycle} batches a step each; the machine is {state} ==");
        trained.push(train(&drumline, &folder, world, args.epochs)?);
    }
    let text = markdown(&trained, args);
    print!("{text}");
    let pictures = if args.save { workspace::root().join("docs/images") } else { folder };
    draw(&drumline, &trained, &pictures)?;
    if args.save {
        report::save("update-cycle", &text, &csv(&trained))?;
    }
    let difference = greatest_difference(&trained, FIRST);
    ensure!(
        difference <= MOST_DIFFERENCE,
        "losses differ by {difference:.1e}, expected {MOST_DIFFERENCE:.0e} at most"
    );
    Ok(())
}

fn train(drumline: &Path, folder: &Path, world: World, epochs: usize) -> anyhow::Result<Trained> {
    let World { ranks, cycle } = world;
    let out = folder.join(format!("{ranks}x{cycle}"));
    let config = std::fs::read_to_string(workspace::root().join("config/nmt.yaml"))?;
    let config = config.replace("data/translation", text(&folder.join("data"))?);
    // Plots know a run by the folder of its log.
    let config = config.replace("exp/nmt/log", text(&out)?).replace("exp/nmt", text(&out)?);
    let file = folder.join(format!("{ranks}x{cycle}.yaml"));
    std::fs::write(&file, config)?;
    let pairs = [
        ("training_configs.batch_size", TOKENS),
        ("training_configs.update_cycle", cycle),
        ("training_configs.max_epochs", epochs),
    ];
    let mut command = Command::new(drumline);
    command.args(["train", "--nproc-per-node", &ranks.to_string(), "--cfg"]);
    command.arg(file).env("OMP_NUM_THREADS", "1");
    command.args(pairs.iter().flat_map(|(key, value)| [(*key).to_owned(), value.to_string()]));
    child::run(command, LIMIT)?;
    let log = out.join("metrics.jsonl");
    let events = std::fs::read_to_string(&log).with_context(|| format!("cannot read {}", log.display()))?;
    let events: Vec<Value> = events.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let column = |kind: &str, key: &str| -> Vec<f64> {
        let of_kind = events.iter().filter(|event| event["kind"] == kind);
        of_kind.filter_map(|event| event[key].as_f64()).collect()
    };
    let per_s = median(column("step", "samples_per_s")).unwrap_or(f64::NAN);
    let bleu = column("eval", "bleu").last().copied().unwrap_or(f64::NAN);
    Ok(Trained { world, log: out, losses: column("step", "loss"), per_s, bleu })
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Relative, over the first steps of all trainings; infinite if they have not as many steps.
fn greatest_difference(trained: &[Trained], steps: usize) -> f64 {
    let first = &trained[0].losses;
    let differences = trained[1..].iter().map(|other| {
        if other.losses.len() != first.len() {
            return f64::INFINITY;
        }
        let pairs = first.iter().zip(&other.losses).take(steps);
        pairs.map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max)
    });
    differences.fold(0.0, f64::max)
}

fn draw(drumline: &Path, trained: &[Trained], folder: &Path) -> anyhow::Result<()> {
    for (metric, name, smooth) in [("loss", "loss", "0"), ("samples_per_s", "speed", "0.9")] {
        let picture = folder.join(format!("update-cycle-{name}.svg"));
        let mut command = Command::new(drumline);
        command.arg("plot").args(trained.iter().map(|trained| &trained.log));
        command.args(["--metric", metric, "--smooth", smooth, "--out"]).arg(&picture);
        child::run(command, LIMIT)?;
        println!("{}", picture.display());
    }
    Ok(())
}

fn markdown(trained: &[Trained], args: &UpdateCycleArgs) -> String {
    let about = [
        machine::describe(),
        format!(
            "config/nmt.yaml, {} epochs, batches of {TOKENS} tokens, four a step; one thread a rank; one training after the other",
            args.epochs
        ),
    ];
    let mut text = report::head("Ranks and update cycles of the same total batch", about);
    text += "\n";
    let heads =
        row!["ranks", "update_cycle", "steps", "sentences/s (median)", "against 1 rank", "last loss", "BLEU"];
    let mut rows = vec![heads];
    for one in trained {
        rows.push(row![
            one.world.ranks,
            one.world.cycle,
            one.losses.len(),
            format!("{:.0}", one.per_s),
            format!("{:.2}", one.per_s / trained[0].per_s),
            format!("{:.5}", one.losses.last().copied().unwrap_or(f64::NAN)),
            format!("{:.2}", one.bleu),
        ]);
    }
    text += &report::table(&rows);
    let _ = writeln!(
        text,
        "\nGreatest relative difference of a step's loss: {:.1e} in the first {FIRST} steps (at most {MOST_DIFFERENCE:.0e}), {:.1e} in all: \
         gradients are added up in another order, and a training multiplies what rounding changes.",
        greatest_difference(trained, FIRST),
        greatest_difference(trained, usize::MAX)
    );
    text
}

fn csv(trained: &[Trained]) -> String {
    let mut text = String::from("ranks,update_cycle,step,loss\n");
    for one in trained {
        for (step, loss) in one.losses.iter().enumerate() {
            let _ = writeln!(text, "{},{},{},{loss}", one.world.ranks, one.world.cycle, step + 1);
        }
    }
    text
}
