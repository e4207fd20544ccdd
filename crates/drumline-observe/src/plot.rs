//! Curves of runs: chosen metrics over steps, as SVG or PNG.
//!
//! ```text
//!   metrics.jsonl of each run ─▶ curve: points by metric, smoothed, thinned ─▶ axis: positions of ticks ─▶ draw ─┬▶ SVG
//!                                                                                                               └▶ PNG
//! ```
//! A metric has a panel of its own, with a curve for the training steps of each run and one, with dots, for its evaluations.

mod axis;
mod curve;
mod draw;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::events::{self, Event, EventsError, METRICS};
use crate::runs;
use curve::Panel;

/// A run to be shown.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Its name in the legend.
    pub name: String,
    /// Its events.
    pub events: Vec<Event>,
}

/// How curves are shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlotOptions {
    /// Weight of the past, from 0 (none) to below 1. The unsmoothed curve stays visible behind.
    pub smooth: f64,
    /// The vertical axis.
    pub scale: Scale,
    /// Size of each panel, in points.
    pub panel: (u32, u32),
}

impl Default for PlotOptions {
    fn default() -> Self {
        Self { smooth: 0.0, scale: Scale::Linear, panel: (720, 440) }
    }
}

/// The scale of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// Equal differences have equal distances.
    #[default]
    Linear,
    /// Equal ratios have equal distances; values of 0 and less are left out.
    Log,
}

/// The format of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Lines and text, sharp at any size.
    Svg,
    /// Pixels, two for each point.
    Png,
}

/// A plot cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The path has no run.
    #[error("no run in {}: there is no {METRICS} in it or one level down; try the OUT_DIR of a run", path.display())]
    NoRun {
        /// The given path.
        path: PathBuf,
    },
    /// A run that has only just started, or an empty one.
    #[error("no steps and no evaluations in {runs}; try again when the run has made a step")]
    NoPoints {
        /// Their names.
        runs: String,
    },
    /// The runs do not have this metric.
    #[error("no metric `{metric}` in {runs}; try {known}")]
    NoMetric {
        /// The given metric.
        metric: String,
        /// The runs that were searched.
        runs: String,
        /// The metrics that exist.
        known: String,
    },
    /// All values are numbers that the axis cannot show.
    #[error("`{metric}` has no value that can be shown{hint}")]
    NothingToShow {
        /// The metric.
        metric: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A weight of 1 or more, or less than 0.
    #[error("smoothing of {0}, expected at least 0 and less than 1; try 0.9")]
    Smooth(f64),
    /// The file's name ends in neither of the two formats.
    #[error("the format of {} is not known; try a name that ends in .svg or .png", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// The events cannot be read.
    #[error(transparent)]
    Events(#[from] EventsError),
    /// The picture cannot be drawn.
    #[error("cannot draw: {0}")]
    Draw(String),
    /// The picture cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
}

impl Format {
    /// The format by the extension of a file.
    pub fn of(path: &Path) -> Result<Self, PlotError> {
        let end = path.extension().map(|end| end.to_ascii_lowercase());
        match end.as_deref().and_then(|end| end.to_str()) {
            Some("svg") => Ok(Self::Svg),
            Some("png") => Ok(Self::Png),
            _ => Err(PlotError::Format { path: path.to_owned() }),
        }
    }
}

/// Reads runs: the `OUT_DIR` of each, a folder one above several, or a file of events. The name of each is the last part of its
/// path, or all of it if that is not unique.
pub fn load(paths: &[PathBuf]) -> Result<Vec<Run>, PlotError> {
    let mut files = Vec::new();
    for path in paths {
        let in_folder =
            || runs::within(path).into_iter().map(|run| run.join(METRICS)).filter(|file| file.is_file());
        let found: Vec<_> = if path.is_file() { vec![path.clone()] } else { in_folder().collect() };
        if found.is_empty() {
            return Err(PlotError::NoRun { path: path.clone() });
        }
        files.extend(found.into_iter().map(|file| (called(path, &file), file)));
    }
    let last = |(path, _): &(PathBuf, PathBuf)| {
        fs::canonicalize(path).ok()?.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    let lasts: Vec<_> = files.iter().map(last).collect();
    let is_enough = lasts.iter().collect::<BTreeSet<_>>().len() == files.len();
    let run = |((path, file), last): (&(PathBuf, PathBuf), Option<String>)| {
        let name = last.filter(|_| is_enough).unwrap_or_else(|| path.display().to_string());
        Ok(Run { name, events: events::read(file)? })
    };
    files.iter().zip(lasts).map(run).collect()
}

/// The path that names a run: the given one, unless the run's folder is below that.
fn called(given: &Path, file: &Path) -> PathBuf {
    let folder = file.parent().unwrap_or(file);
    if given.join(METRICS) == file || given == file { given.to_owned() } else { folder.to_owned() }
}

/// The metrics that any of the runs has, by name.
pub fn metrics(runs: &[Run]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for event in runs.iter().flat_map(|run| &run.events) {
        names.extend(event.figures().map(|(name, _)| name.to_owned()));
    }
    names
}

/// The metrics that are shown by default: the loss, and the metrics of evaluations.
pub fn usual_metrics(runs: &[Run]) -> Vec<String> {
    let is_eval = |event: &&Event| matches!(event, Event::Eval(_));
    let evals = runs.iter().flat_map(|run| run.events.iter().filter(is_eval));
    let names: BTreeSet<_> = evals.flat_map(|event| event.figures().map(|(name, _)| name)).collect();
    let others = names.into_iter().filter(|name| *name != "loss");
    let loss = metrics(runs).contains("loss").then_some("loss");
    let chosen: Vec<String> = loss.into_iter().chain(others).map(str::to_owned).collect();
    if chosen.is_empty() { metrics(runs).into_iter().collect() } else { chosen }
}

/// A picture of `metrics`, with a panel for each; of the default ones if `metrics` is empty.
///
/// ```
/// use drumline_observe::events::{Event, StepEvent};
/// use drumline_observe::plot::{Format, PlotOptions, Run, draw};
///
/// let step = |step| Event::Step(StepEvent { step, loss: 1.0 / step as f64, ..Default::default() });
/// let run = Run { name: "first try".into(), events: (1..100).map(step).collect() };
/// let picture = draw(&[run], &["loss".into()], Format::Svg, PlotOptions { smooth: 0.9, ..Default::default() })?;
/// assert!(String::from_utf8_lossy(&picture).contains("first try"));
/// # Ok::<(), drumline_observe::plot::PlotError>(())
/// ```
pub fn draw(
    runs: &[Run],
    metrics: &[String],
    format: Format,
    options: PlotOptions,
) -> Result<Vec<u8>, PlotError> {
    if !(0.0..1.0).contains(&options.smooth) {
        return Err(PlotError::Smooth(options.smooth));
    }
    let chosen = if metrics.is_empty() { usual_metrics(runs) } else { metrics.to_vec() };
    let panels = panels(runs, &chosen, options)?;
    match format {
        Format::Svg => Ok(draw::svg(&panels, options)?.into_bytes()),
        Format::Png => draw::png(&panels, options),
    }
}

/// Draws, and writes the picture to a file whose extension is its format.
pub fn save(path: &Path, runs: &[Run], metrics: &[String], options: PlotOptions) -> Result<(), PlotError> {
    let picture = draw(runs, metrics, Format::of(path)?, options)?;
    fs::write(path, picture).map_err(|source| PlotError::Write { path: path.to_owned(), source })
}

fn panels(runs: &[Run], chosen: &[String], options: PlotOptions) -> Result<Vec<Panel>, PlotError> {
    let known = metrics(runs);
    let names = || runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ");
    if known.is_empty() {
        return Err(PlotError::NoPoints { runs: names() });
    }
    if let Some(metric) = chosen.iter().find(|metric| !known.contains(*metric)) {
        let listed = known.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Err(PlotError::NoMetric { metric: metric.clone(), runs: names(), known: listed });
    }
    chosen.iter().map(|metric| Panel::new(runs, metric, options)).collect()
}

#[cfg(test)]
mod tests;
