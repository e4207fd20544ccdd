//! Decides where each worker's output goes, as torchrun's flags do: a pure function.
//!
//! | `--redirects` | `--tee` | file | console |
//! |---|---|---|---|
//! | no  | no  | no  | yes |
//! | yes | no  | yes | no  |
//! | any | yes | yes | yes |
//!
//! `--local-ranks-filter` and `--quiet-ranks` then remove ranks from the console; they do not change files.
//! `--duplicate-stdout-filters` and `--duplicate-stderr-filters` select lines from what reaches the console.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// One of a worker's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    Out,
    Err,
}

impl Channel {
    pub(crate) const BOTH: [Channel; 2] = [Channel::Out, Channel::Err];
}

/// A selection of a worker's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Std {
    /// Neither; `0` on the command line.
    #[default]
    None,
    /// Its stdout; `1`.
    Out,
    /// Its stderr; `2`.
    Err,
    /// Both; `3`.
    Both,
}

impl Std {
    fn parse(digit: &str) -> Option<Self> {
        [Std::None, Std::Out, Std::Err, Std::Both].into_iter().find(|std| std.to_string() == digit)
    }

    fn has(self, channel: Channel) -> bool {
        match self {
            Std::None => false,
            Std::Out => channel == Channel::Out,
            Std::Err => channel == Channel::Err,
            Std::Both => true,
        }
    }
}

impl fmt::Display for Std {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", *self as u8)
    }
}

/// A selection of streams for each local rank.
///
/// ```
/// use drumline_launch::{Std, StdOf};
///
/// let all: StdOf = "3".parse()?;
/// let some: StdOf = "0:1,12:2".parse()?;
/// assert_eq!((all.of(7), some.of(12), some.of(7)), (Std::Both, Std::Err, Std::None));
/// # Ok::<(), drumline_launch::StdOfError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StdOf {
    all: Std,
    each: BTreeMap<usize, Std>,
}

impl StdOf {
    /// The selected streams of this local rank.
    pub fn of(&self, local_rank: usize) -> Std {
        self.each.get(&local_rank).copied().unwrap_or(self.all)
    }

    /// Whether no stream of any rank is selected.
    pub fn is_none(&self) -> bool {
        self.all == Std::None && self.each.values().all(|std| *std == Std::None)
    }
}

impl From<Std> for StdOf {
    fn from(all: Std) -> Self {
        Self { all, each: BTreeMap::new() }
    }
}

impl fmt::Display for StdOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.each.is_empty() {
            return self.all.fmt(f);
        }
        let each: Vec<_> = self.each.iter().map(|(rank, std)| format!("{rank}:{std}")).collect();
        f.write_str(&each.join(","))
    }
}

/// Why a text is not a valid selection of streams.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StdOfError {
    /// A part is neither a choice of streams nor a rank with one.
    #[error(
        "cannot read `{part}` in `{text}`: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all ranks, \
         or LOCAL_RANK:CHOICE for each; try `3` or `0:1,1:2`"
    )]
    Unreadable {
        /// The whole text.
        text: String,
        /// The part that could not be parsed.
        part: String,
    },
    /// A rank is listed twice.
    #[error("local rank {local_rank} is listed twice in `{text}`; try one LOCAL_RANK:CHOICE for it")]
    Twice {
        /// The whole text.
        text: String,
        /// The rank.
        local_rank: usize,
    },
}

impl FromStr for StdOf {
    type Err = StdOfError;

    fn from_str(text: &str) -> Result<Self, StdOfError> {
        if let Some(all) = Std::parse(text) {
            return Ok(all.into());
        }
        let mut each = BTreeMap::new();
        for part in text.split(',') {
            let unreadable = || StdOfError::Unreadable { text: text.into(), part: part.into() };
            let (local_rank, std) = pair(part).ok_or_else(unreadable)?;
            if each.insert(local_rank, std).is_some() {
                return Err(StdOfError::Twice { text: text.into(), local_rank });
            }
        }
        Ok(Self { all: Std::None, each })
    }
}

/// Parses `12:3`. Digits only: the standard parser would also accept `+12`.
fn pair(part: &str) -> Option<(usize, Std)> {
    let (rank, std) = part.split_once(':')?;
    let rank = rank.bytes().all(|byte| byte.is_ascii_digit()).then_some(rank)?;
    Some((rank.parse().ok()?, Std::parse(std)?))
}

/// Lines that contain one of these texts are also written to a separate file, one for all workers of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LineFilters {
    /// For stdout.
    pub stdout: Vec<String>,
    /// For stderr.
    pub stderr: Vec<String>,
}

impl LineFilters {
    pub(super) fn of(&self, channel: Channel) -> &[String] {
        match channel {
            Channel::Out => &self.stdout,
            Channel::Err => &self.stderr,
        }
    }

    /// Whether no line is copied.
    pub fn is_empty(&self) -> bool {
        self.stdout.is_empty() && self.stderr.is_empty()
    }
}

/// The log settings of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LogPlan {
    /// Where the run's folder is created; a temporary folder by default, none for `/dev/null`.
    pub dir: Option<PathBuf>,
    /// Streams that go to a file instead of the console.
    pub redirects: StdOf,
    /// Streams that go to a file and the console.
    pub tee: StdOf,
    /// Lines that are also written to a separate file.
    pub duplicates: LineFilters,
    /// The local ranks that reach the console; all if it is empty (`--local-ranks-filter`).
    pub filter: Option<BTreeSet<usize>>,
    /// Whether only rank 0 of the job reaches the console.
    pub quiet_ranks: bool,
    /// The prefix of a line (`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`); `[rank 3]: ` by default.
    pub prefix: Option<String>,
    /// How progress bars are shown if the console is a terminal.
    pub bars: Bars,
}

/// How the console shows progress bars.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Bars {
    /// As a line at intervals, for a terminal that others also write to.
    #[default]
    Paced,
    /// Each in its own row, where it is redrawn.
    Redrawn,
}

/// Where one stream goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) file: bool,
    pub(crate) console: bool,
}

impl LogPlan {
    /// The destinations of a stream of the worker with this `rank` in the job and `local_rank` on its node.
    pub(crate) fn route(&self, rank: usize, local_rank: usize, channel: Channel) -> Route {
        let redirected = self.redirects.of(local_rank).has(channel) && self.wants_folder();
        let teed = self.tee.of(local_rank).has(channel);
        let mut filter = self.filter.iter().filter(|filter| !filter.is_empty());
        let shown = filter.all(|filter| filter.contains(&local_rank)) && (!self.quiet_ranks || rank == 0);
        Route { file: (redirected || teed) && self.wants_folder(), console: (teed || !redirected) && shown }
    }

    /// Whether there is a log folder. Without one, redirected output goes to the console, as in torchrun.
    pub fn wants_folder(&self) -> bool {
        self.dir.as_deref() != Some("/dev/null".as_ref())
    }

    /// Whether any stream goes to a file.
    pub(crate) fn writes_files(&self) -> bool {
        self.wants_folder() && !(self.redirects.is_none() && self.tee.is_none() && self.duplicates.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_parsed_and_formatted() {
        for text in ["0", "1", "2", "3", "0:1", "0:3,1:0,2:1,13:2"] {
            assert_eq!(text.parse::<StdOf>().unwrap().to_string(), text);
        }
        let some: StdOf = "0:1,1:2".parse().unwrap();
        assert_eq!([0, 1, 2].map(|rank| some.of(rank)), [Std::Out, Std::Err, Std::None]);
        assert!("0:0".parse::<StdOf>().unwrap().is_none() && !some.is_none());
    }

    #[test]
    fn errors_name_the_invalid_part() {
        for (text, part) in [
            ("", ""),
            ("4", "4"),
            ("03", "03"),
            ("0:1,", ""),
            ("0:1,1:9", "1:9"),
            ("a:1", "a:1"),
            ("+1:1", "+1:1"),
            ("-1:1", "-1:1"),
            ("0:1 ,1:2", "0:1 "),
            (":1", ":1"),
            ("99999999999999999999:1", "99999999999999999999:1"),
        ] {
            let unreadable = StdOfError::Unreadable { text: text.into(), part: part.into() };
            assert_eq!(text.parse::<StdOf>(), Err(unreadable), "{text}");
        }
        let error = "1:1,1:2".parse::<StdOf>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "local rank 1 is listed twice in `1:1,1:2`; try one LOCAL_RANK:CHOICE for it"
        );
    }

    #[test]
    fn streams_go_where_torchrun_sends_them() {
        let plan = |redirects: &str, tee: &str| LogPlan {
            redirects: redirects.parse().unwrap(),
            tee: tee.parse().unwrap(),
            ..LogPlan::default()
        };
        let out = |plan: &LogPlan, rank| {
            let route = plan.route(rank, rank, Channel::Out);
            (route.file, route.console)
        };
        assert_eq!(out(&plan("0", "0"), 0), (false, true));
        assert_eq!(out(&plan("1", "0"), 0), (true, false));
        assert_eq!(out(&plan("0", "3"), 0), (true, true));
        assert_eq!(out(&plan("3", "0:1"), 0), (true, true));
        assert_eq!(out(&plan("3", "0:1"), 1), (true, false));
        assert_eq!(out(&plan("2", "2"), 0), (false, true), "only stderr was selected");
        let filtered =
            |ranks: &[usize]| LogPlan { filter: Some(ranks.iter().copied().collect()), ..plan("1:1", "0:3") };
        assert_eq!(out(&filtered(&[1]), 0), (true, false), "a filter does not remove the file of a tee");
        assert_eq!(out(&filtered(&[1]), 1), (true, false), "a filter does not undo a redirect");
        assert_eq!(out(&filtered(&[1]), 2), (false, false));
        assert_eq!(out(&filtered(&[]), 2), (false, true), "an empty filter means all");
        let quiet = LogPlan { quiet_ranks: true, ..plan("0", "1") };
        assert_eq!((out(&quiet, 0), out(&quiet, 1)), ((true, true), (true, false)));
        assert!(!quiet.route(4, 0, Channel::Out).console, "rank 0 of the job, not of the node");
        let nowhere = LogPlan { dir: Some("/dev/null".into()), ..plan("3", "0") };
        assert_eq!(out(&nowhere, 0), (false, true));
    }
}
