//! `drumline schedule show`: what each rank of a pipeline does, when, and how long it is idle.
//!
//! Everything is computed in `drumline-plan`: the program of the schedule or of a file is verified, and played on a virtual clock.

mod report;
mod svg;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use drumline_plan::pipeline::{CsvForm, PipelineSize, Program, Schedule, StageTimes, Times, verify};

use crate::errors::Mistake;
use report::Report;

const EXAMPLES: &str = "\
Examples:
  drumline schedule show --schedule gpipe --micro-batches 1    naive: one rank works at a time
  drumline schedule show --schedule gpipe                      8 micro-batches: a shorter bubble
  drumline schedule show --schedule 1f1b                       the same, half of the activations
  drumline schedule show --schedule interleaved --chunks 4 --hop 0.1
  drumline schedule show --schedule zbv --svg zbv.svg --csv zbv.csv
  drumline schedule show --from zbv.csv                        a file of ours or of PyTorch

How to read the grid: a row is a rank, a column a unit of time. F0 is the forward of micro-batch 0,
B0 its backward. I0 and W0 are the halves of a backward: the gradient of the input, and the
gradients of the weights. Where ranks have several stages, 2F0 is the forward of stage 2. A line
continues a computation, a dot is idle time.

Times are those of one micro-batch on one rank, for all of its stages together, in any unit. A
backward takes as long as both halves. The peak of activations is in micro-batches: 1 is what all
stages of a rank keep for one micro-batch between forward and backward.

Each program is verified before it is shown: order, messages, memory, and that no rank waits
forever. docs/pipelines.md explains the schedules.";

/// Look at schedules of pipeline parallelism
#[derive(Debug, clap::Args)]
pub(crate) struct ScheduleArgs {
    #[command(subcommand)]
    command: ScheduleCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ScheduleCommand {
    Show(ShowArgs),
}

/// Show what each rank of a pipeline does, when, and how long it is idle
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct ShowArgs {
    /// The schedule
    #[arg(long, required_unless_present = "from", conflicts_with = "from", ignore_case = true, value_parser = schedules())]
    schedule: Option<Schedule>,
    /// A program in PyTorch's CSV instead of a schedule: a line for each rank
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ranks", "chunks", "micro_batches"])]
    from: Option<PathBuf>,
    /// Ranks of the pipeline
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,
    /// Stages of each rank [default: 2 for interleaved, bfs and zbv, 1 for the others]
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Micro-batches of a step
    #[arg(long, value_name = "N", default_value_t = 8)]
    micro_batches: usize,
    /// Time of a forward
    #[arg(long, value_name = "TIME", default_value = "1", value_parser = time)]
    forward: f64,
    /// Time of the gradient of the input
    #[arg(long, value_name = "TIME", default_value = "1", value_parser = time)]
    input: f64,
    /// Time of the gradients of the weights
    #[arg(long, value_name = "TIME", default_value = "1", value_parser = time)]
    weight: f64,
    /// Time of a message between two ranks
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time)]
    hop: f64,
    /// Also draw it to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Also write the program to this file, with its messages, as PyTorch's CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Names of schedules, with PyTorch's for the same.
fn schedules() -> impl TypedValueParser<Value = Schedule> {
    let named = |schedule: Schedule| PossibleValue::new(schedule.name()).aliases(schedule.other_names());
    PossibleValuesParser::new(Schedule::ALL.map(named)).try_map(|name| name.parse::<Schedule>())
}

fn time(text: &str) -> Result<f64, String> {
    let time = text.parse::<f64>().ok().filter(|time| time.is_finite() && *time >= 0.0);
    time.ok_or_else(|| "expected a number of at least 0".to_owned())
}

/// Runs `drumline schedule show`.
pub(crate) fn schedule(args: ScheduleArgs) -> anyhow::Result<()> {
    let ScheduleCommand::Show(args) = args.command;
    let program = args.program()?;
    let verified = verify(&program).map_err(|error| args.mistake(error))?;
    let rank = StageTimes { forward: args.forward, input: args.input, weight: args.weight };
    let times = Times::equal(rank, &program.stages, args.hop);
    let report = Report::new(&args.title(&program), verified, rank, &times);
    if let Some(file) = &args.svg {
        write(file, &svg::draw(&report))?;
    }
    if let Some(file) = &args.csv {
        write(file, &program.to_csv(CsvForm::All))?;
    }
    let text = if args.json { report.json()? } else { report.text(&console::Term::stdout()) };
    std::io::stdout().write_all(text.as_bytes()).context("cannot print")
}

impl ShowArgs {
    fn program(&self) -> anyhow::Result<Program> {
        if let Some(file) = &self.from {
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            return Ok(Program::from_csv(&text).map_err(|error| self.mistake(error))?);
        }
        let schedule = self.schedule.context("no schedule; try --schedule gpipe")?;
        let chunks = self.chunks.unwrap_or(schedule.default_chunks());
        let size = PipelineSize { ranks: self.ranks, chunks, micro_batches: self.micro_batches };
        Ok(schedule.program(size).map_err(|error| self.mistake(error))?)
    }

    /// An error of the program, with the file that it came from.
    fn mistake(&self, error: impl std::fmt::Display) -> Mistake {
        match &self.from {
            Some(file) => Mistake::new(format!("{}: {error}", file.display())),
            None => Mistake::new(error),
        }
    }

    fn title(&self, program: &Program) -> String {
        let name = match (&self.schedule, &self.from) {
            (Some(schedule), _) => schedule.to_string(),
            (None, Some(file)) => file.display().to_string(),
            (None, None) => String::new(),
        };
        let counted =
            |number: usize, one: &str| format!("{number} {one}{}", if number == 1 { "" } else { "s" });
        let [ranks, stages, micro_batches] = [
            counted(program.rows.len(), "rank"),
            counted(program.stages.num_stages(), "stage"),
            counted(program.num_micro_batches, "micro-batch").replace("batchs", "batches"),
        ];
        format!("{name}: {ranks}, {stages}, {micro_batches}")
    }
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
