//! What each line of a file does here, as a table for people and as data.

use std::fmt;

use serde::Serialize;

use super::error::Problem;
use super::given::Given;
use super::keys::Effect;
use super::plan::Became;
use super::read::{DeepSpeedConfig, Found, Setting};
use super::resolve::{Outcome, outcome};

/// What a file does here, line by line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The file.
    pub file: String,
    /// Its lines.
    pub lines: Vec<ExplainedLine>,
    /// Why it cannot be used, if so: one mistake each, with the line at which it is.
    pub mistakes: Vec<String>,
}

/// What one line does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExplainedLine {
    /// Its number.
    pub line: usize,
    /// The path of its key.
    pub key: String,
    /// Its value as JSON.
    pub value: String,
    /// `carried out`, `not needed`, `refused`, `no effect`, `unknown` or `mistake`.
    pub effect: &'static str,
    /// What it does.
    pub says: String,
}

impl DeepSpeedConfig {
    /// What each line does here, also if the file cannot be used.
    ///
    /// ```
    /// use drumline::config::deepspeed::{DeepSpeedConfig, Given};
    ///
    /// let config = DeepSpeedConfig::parse("ds.json", r#"{"train_batch_size": 8, "gradient_cliping": 1}"#)?;
    /// let explained = config.explain(&Given::ranks(2));
    /// assert_eq!(explained.lines[0].effect, "carried out");
    /// assert_eq!(explained.lines[1].says, "DeepSpeed has no such key; try gradient_clipping");
    /// # Ok::<(), drumline::config::deepspeed::DeepSpeedError>(())
    /// ```
    pub fn explain(&self, given: &Given) -> Explanation {
        let outcome = outcome(self, given);
        let lines = self.settings().iter().map(|setting| explained(setting, &outcome)).collect();
        let mistakes = outcome.problems.iter().map(|problem| self.located(problem)).collect();
        Explanation { file: self.name().to_owned(), lines, mistakes }
    }

    /// A mistake with the name of the file and its place there.
    pub fn located(&self, problem: &Problem) -> String {
        let place = problem.at.map(|at| format!(":{at}")).unwrap_or_default();
        format!("{}{place}: {problem}", self.name())
    }
}

fn explained(setting: &Setting, outcome: &Outcome) -> ExplainedLine {
    let (effect, says) = of_setting(setting, outcome);
    let (key, value) = (setting.path.clone(), setting.written.clone());
    ExplainedLine { line: setting.at.line, key, value, effect, says }
}

fn of_setting(setting: &Setting, outcome: &Outcome) -> (&'static str, String) {
    let problem = outcome.problems.iter().find(|problem| problem.at == Some(setting.at));
    match &setting.found {
        Found::Refused(key) => (Effect::Refused.name(), key.says.to_owned()),
        Found::Misplaced(why) => ("no effect", (*why).to_owned()),
        Found::Unknown { advice } => ("unknown", format!("DeepSpeed has no such key{advice}")),
        _ if let Some(problem) = problem => ("mistake", problem.what.clone()),
        Found::Wrong { expects, .. } => ("mistake", format!("expected {expects}")),
        Found::NotASection => ("mistake", "it is a section, which has keys of its own".to_owned()),
        Found::Key(key) => of_key(key, outcome, ""),
        Found::Old(key) => of_key(key, outcome, &format!("now {}; ", key.path)),
    }
}

fn of_key(key: &super::keys::Key, outcome: &Outcome, before: &str) -> (&'static str, String) {
    if let Some((_, why)) = outcome.inactive.iter().find(|(path, _)| *path == key.path) {
        return ("no effect", format!("{before}{why}"));
    }
    let became = outcome.autos.iter().find(|became| became.key == key.path);
    let auto = became.map(|Became { value, from, .. }| format!("{value}, from {from}; ")).unwrap_or_default();
    // A refused key that is in the file with its default.
    let effect = if key.effect == Effect::Refused { Effect::NotNeeded } else { key.effect };
    let says = if key.effect == Effect::Refused { "it is off" } else { key.says };
    (effect.name(), format!("{before}{auto}{says}"))
}

/// A table of four columns, then the mistakes.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |of: fn(&ExplainedLine) -> usize| self.lines.iter().map(of).max().unwrap_or(0);
        let key = width(|line| line.key.chars().count());
        let value = width(|line| line.value.chars().count()).min(WIDEST);
        for line in &self.lines {
            let ExplainedLine { line, key: path, value: written, effect, says } = line;
            let written = shortened(written);
            writeln!(f, "{line:>4}  {path:key$}  {written:value$}  {effect:11}  {says}")?;
        }
        for mistake in &self.mistakes {
            writeln!(f, "mistake: {mistake}")?;
        }
        Ok(())
    }
}

/// The widest value in a table.
const WIDEST: usize = 24;

fn shortened(value: &str) -> String {
    if value.chars().count() <= WIDEST {
        return value.to_owned();
    }
    value.chars().take(WIDEST - 1).chain(['…']).collect()
}
