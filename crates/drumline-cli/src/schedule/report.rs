//! What `drumline schedule show` prints: the grid, and a table of ranks; or the same as JSON.

use console::{Style, Term};
use drumline_plan::pipeline::{
    Compute, Grid, Idle, IdleCause, Program, RankPeak, Slot, StageBytes, StageTimes, Timeline, Times,
    Verified,
};
use serde_json::{Map, Value, json};

/// A program on the clock.
pub(super) struct Report<'a> {
    /// What it is: the schedule and its size.
    pub(super) title: String,
    pub(super) program: &'a Program,
    pub(super) timeline: Timeline,
    peaks: Vec<RankPeak>,
    rank: StageTimes,
    hop: f64,
}

/// More columns are no picture.
const MOST_COLUMNS: usize = 4000;

impl<'a> Report<'a> {
    pub(super) fn new(title: &str, verified: Verified<'a>, rank: StageTimes, times: &Times) -> Self {
        let program = verified.program();
        Self {
            title: title.to_owned(),
            program,
            timeline: verified.simulate(times),
            peaks: verified.peaks(&vec![StageBytes::default(); program.stages.num_stages()]),
            rank,
            hop: times.hop,
        }
    }

    /// The most activations that a rank keeps, in micro-batches of all of its stages.
    fn peak(&self, rank: usize) -> f64 {
        self.peaks[rank].activations as f64 / self.program.stages.stages_of(rank).len() as f64
    }

    pub(super) fn idle_percent(&self) -> f64 {
        100.0 * self.timeline.idle_share()
    }

    pub(super) fn text(&self, terminal: &Term) -> String {
        let StageTimes { forward, input, weight } = self.rank;
        let times =
            format!("forward {forward}, input gradient {input}, weight gradients {weight}, hop {}", self.hop);
        let summary = format!(
            "makespan {:.2}, idle {:.1} %, {} messages",
            self.timeline.makespan,
            self.idle_percent(),
            self.num_messages()
        );
        format!("{}; {times}\n\n{}\n{summary}\n\n{}", self.title, self.grid(terminal), self.table())
    }

    fn num_messages(&self) -> usize {
        let is_send = |action: &&drumline_plan::pipeline::Action| {
            matches!(action, drumline_plan::pipeline::Action::Send(_))
        };
        self.program.rows.iter().flatten().filter(is_send).count()
    }

    /// The grid; on a terminal in colours, and cut into lines that fit.
    fn grid(&self, terminal: &Term) -> String {
        let columns = Grid::num_columns(&self.timeline);
        if columns > MOST_COLUMNS {
            return format!("(a grid of {columns} columns is not shown; try --svg FILE)\n");
        }
        let grid = Grid::new(&self.timeline);
        if !terminal.is_term() {
            return grid.to_string();
        }
        let label = format!("rank {}  ", grid.rows.len().saturating_sub(1)).len();
        let fit = ((usize::from(terminal.size().1)).saturating_sub(label) / grid.width()).max(1);
        let blocks = (0..columns).step_by(fit).map(|from| {
            let line = |rank: usize| {
                let cells = (from..columns.min(from + fit)).map(|column| self.coloured(&grid, rank, column));
                format!("{:<label$}{}\n", format!("rank {rank}"), cells.collect::<String>())
            };
            (0..grid.rows.len()).map(line).collect::<String>()
        });
        blocks.collect::<Vec<_>>().join("\n")
    }

    fn coloured(&self, grid: &Grid, rank: usize, column: usize) -> String {
        let text = grid.cell(rank, column);
        match grid.rows[rank][column] {
            Slot::Idle => Style::new().dim().apply_to(text).to_string(),
            Slot::Begin(work) | Slot::Continue(work) => {
                let is_later = self.program.stages.chunk_of(work.stage) % 2 == 1;
                let style = Style::new().black().on_color256(colour(work.compute, is_later));
                style.apply_to(text).to_string()
            }
        }
    }

    /// A line for each rank.
    fn table(&self) -> String {
        let causes = IdleCause::ALL.map(|cause| format!("{:>9}", cause.name())).join(" ");
        let head = format!("rank      busy    idle %  {causes}      peak of activations\n");
        let line = |rank: usize| {
            let idle = self.timeline.idle(rank);
            let causes = IdleCause::ALL.map(|cause| format!("{:>9.2}", idle.of(cause))).join(" ");
            format!(
                "{rank:>4}  {:>8.2}  {:>8.1}  {causes}  {:>8.2}\n",
                self.timeline.busy(rank),
                self.percent(&idle),
                self.peak(rank)
            )
        };
        head + &(0..self.program.rows.len()).map(line).collect::<String>()
    }

    fn percent(&self, idle: &Idle) -> f64 {
        if self.timeline.makespan > 0.0 { 100.0 * idle.total() / self.timeline.makespan } else { 0.0 }
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        let ranks = (0..self.program.rows.len()).map(|rank| {
            let idle = self.timeline.idle(rank);
            let causes = IdleCause::ALL.map(|cause| (cause.name().to_owned(), Value::from(idle.of(cause))));
            json!({
                "rank": rank,
                "stages": self.program.stages.stages_of(rank),
                "busy": self.timeline.busy(rank),
                "idle": Map::from_iter(causes),
                "idle_percent": self.percent(&idle),
                "peak_activations": self.peak(rank),
                "receive_buffers": self.peaks[rank].received,
                "actions": self.program.rows[rank].iter().map(ToString::to_string).collect::<Vec<_>>(),
            })
        });
        let object = json!({
            "title": self.title,
            "micro_batches": self.program.num_micro_batches,
            "makespan": self.timeline.makespan,
            "idle_percent": self.idle_percent(),
            "messages": self.num_messages(),
            "fingerprint": format!("{:016x}", self.program.fingerprint()),
            "ranks": ranks.collect::<Vec<_>>(),
        });
        Ok(serde_json::to_string(&object)? + "\n")
    }
}

/// A colour of the terminal's 256; darker for every other stage of a rank.
fn colour(compute: Compute, is_later: bool) -> u8 {
    let [light, dark] = match compute {
        Compute::Forward => [153, 75],
        Compute::Backward => [223, 215],
        Compute::Input => [217, 210],
        Compute::Weight => [157, 78],
    };
    if is_later { dark } else { light }
}
