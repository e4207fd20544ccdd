//! A pipeline as a picture: a row for each rank, a box for each computation with its micro-batch in it.

use std::fmt::Write;

use drumline_plan::pipeline::{Compute, Span};

use super::report::Report;

/// Pixels.
const WIDTH: f64 = 720.0;
const LEFT: f64 = 68.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 42.0;
const ROW: f64 = 34.0;
const BOX: f64 = 28.0;
const LEGEND: f64 = 30.0;
/// A digit of the text in a box.
const DIGIT: f64 = 6.5;

const STYLE: &str = "\
text{font:13px system-ui,sans-serif;fill:#1f2328;text-anchor:middle}
.bg{fill:#fff}.l{text-anchor:start}.r{text-anchor:end}.s{font-size:11px}.b{font-weight:600}.on{fill:#1f2328;font-size:11px}
.idle{fill:#eff2f5}.F0{fill:#a8d1ff}.F1{fill:#6db0f7}.B0{fill:#ffcf9e}.B1{fill:#f7a95c}.I0{fill:#f9c3c9}.I1{fill:#ee949f}
.W0{fill:#a9e5b5}.W1{fill:#6fcb85}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.bg{fill:#0d1117}.idle{fill:#1c2128}.on{fill:#1f2328}}";

/// The kinds of computations and what the legend says of them.
const LEGENDS: [(Compute, &str); 4] = [
    (Compute::Forward, "forward"),
    (Compute::Backward, "backward"),
    (Compute::Input, "gradient of the input"),
    (Compute::Weight, "gradients of the weights"),
];

/// The picture.
pub(super) fn draw(report: &Report<'_>) -> String {
    let ranks = report.timeline.ranks.len() as f64;
    let height = TOP + ranks * ROW + LEGEND + 8.0;
    let title = report.title.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
    let result = format!("makespan {:.2}, idle {:.1} %", report.timeline.makespan, report.idle_percent());
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" aria-label=\"{title}\">\n<style>\n{STYLE}\n</style>\n\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{height}\" rx=\"8\"/>\n\
         <text x=\"16\" y=\"26\" class=\"l b\">{title}</text>\n\
         <text x=\"{}\" y=\"26\" class=\"r s\">{result}</text>\n",
        WIDTH - RIGHT
    );
    for (rank, spans) in report.timeline.ranks.iter().enumerate() {
        svg += &row(report, rank, spans);
    }
    svg += &legend(report, TOP + ranks * ROW + 6.0);
    svg + "</svg>\n"
}

fn row(report: &Report<'_>, rank: usize, spans: &[Span]) -> String {
    let scale = (WIDTH - LEFT - RIGHT) / report.timeline.makespan.max(f64::MIN_POSITIVE);
    let top = TOP + rank as f64 * ROW;
    let baseline = top + BOX / 2.0 + 4.0;
    let mut row = format!("<text x=\"16\" y=\"{baseline}\" class=\"l\">rank {rank}</text>\n");
    row += &rectangle("idle", LEFT, top, WIDTH - LEFT - RIGHT);
    for span in spans {
        let class =
            format!("{}{}", span.work.compute.letter(), report.program.stages.chunk_of(span.work.stage) % 2);
        let [from, to] = [span.start, span.end].map(|time| LEFT + time * scale);
        // A gap between boxes, as long as there is room for it.
        let width = (to - from - 1.0).max((to - from) * 0.8);
        row += &rectangle(&class, from, top, width);
        let text = span.work.micro_batch.to_string();
        if width >= DIGIT * text.len() as f64 {
            let middle = from + width / 2.0;
            let _ = writeln!(row, "<text x=\"{middle:.1}\" y=\"{baseline}\" class=\"on\">{text}</text>");
        }
    }
    row
}

fn rectangle(class: &str, x: f64, y: f64, width: f64) -> String {
    let radius = if width > 6.0 { 3 } else { 0 };
    format!(
        "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BOX}\" rx=\"{radius}\" class=\"{class}\"/>\n"
    )
}

/// What the colours mean, of those that occur.
fn legend(report: &Report<'_>, top: f64) -> String {
    let spans = || report.timeline.ranks.iter().flatten();
    let mut legend = String::new();
    let mut x = LEFT;
    for (compute, meaning) in LEGENDS {
        if spans().any(|span| span.work.compute == compute) {
            let class = format!("{}0", compute.letter());
            let _ = writeln!(
                legend,
                "<rect x=\"{x}\" y=\"{top}\" width=\"14\" height=\"14\" rx=\"3\" class=\"{class}\"/>\n\
                 <text x=\"{}\" y=\"{}\" class=\"l s\">{meaning}</text>",
                x + 20.0,
                top + 11.0
            );
            x += 36.0 + 6.2 * meaning.len() as f64;
        }
    }
    if report.program.stages.chunks() > 1 {
        let y = top + 11.0;
        let _ = writeln!(
            legend,
            "<text x=\"{x}\" y=\"{y}\" class=\"l s\">dark: the other stages of a rank</text>"
        );
    }
    legend
}
