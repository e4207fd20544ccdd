//! All runs that a page shows, and the answer to "what is new since version N?".
//!
//! ```text
//!   browser ── since=41 ─▶ refresh: read the folders, changes get version 42
//!           ◀── version 42, runs: [ends of curves, rows of ranks, lines of the log]
//! ```
//!
//! A new browser begins with since=0. Nothing is read while no browser asks.
//!
//! A given folder need not exist yet, and may be one above its runs: the runs below it are shown as they appear.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::run_folder::{News, RunFolder};
use crate::runs;

/// For this many seconds requests share what was read.
const FRESH: f64 = 0.2;

/// Which runs a page shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Runs {
    /// The runs in these folders.
    Folders(Vec<PathBuf>),
    /// All jobs of this user that are running or start later.
    Running,
}

/// The runs, as far as they were read.
#[derive(Debug)]
pub(super) struct Watch {
    runs: Vec<Run>,
    /// The given folders.
    roots: Vec<Root>,
    /// The list of running jobs, if all of them are shown.
    list: Option<PathBuf>,
    trouble: Option<String>,
    version: u64,
    /// Our clock at the last read.
    read: f64,
}

#[derive(Debug)]
struct Root {
    name: String,
    folder: PathBuf,
}

#[derive(Debug)]
struct Run {
    name: String,
    folder: RunFolder,
}

impl Run {
    fn new(name: String, folder: PathBuf) -> Self {
        Self { name, folder: RunFolder::new(folder) }
    }
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    version: u64,
    now: f64,
    /// Whether more runs may appear.
    all_running: bool,
    trouble: Option<&'a str>,
    runs: Vec<RunNews<'a>>,
}

#[derive(Debug, Serialize)]
struct RunNews<'a> {
    id: usize,
    name: &'a str,
    folder: String,
    #[serde(flatten)]
    news: News<'a>,
}

impl Watch {
    pub(super) fn new(runs: Runs) -> Self {
        match runs {
            Runs::Folders(folders) => Self::with(folders, None),
            Runs::Running => Self::with(Vec::new(), Some(runs::folder_of_this_user())),
        }
    }

    fn with(folders: Vec<PathBuf>, list: Option<PathBuf>) -> Self {
        let names = names(&folders);
        let roots = folders.into_iter().zip(names).map(|(folder, name)| Root { name, folder }).collect();
        Self { runs: Vec::new(), roots, list, trouble: None, version: 0, read: f64::NEG_INFINITY }
    }

    /// The name and the folder of a run.
    pub(super) fn run(&self, id: usize) -> Option<(&str, &Path)> {
        self.runs.get(id).map(|run| (run.name.as_str(), run.folder.folder()))
    }

    /// What is new after the version `since`, as JSON. `now`: seconds since 1970.
    pub(super) fn answer(&mut self, since: u64, now: f64) -> serde_json::Result<String> {
        // If the clock was set back, read again.
        if !(0.0..FRESH).contains(&(now - self.read)) {
            self.refresh(now);
        }
        // A version that never existed is from another process's page.
        let since = if since > self.version { 0 } else { since };
        let runs = self.runs.iter().enumerate().map(|(id, run)| RunNews {
            id,
            name: &run.name,
            folder: run.folder.folder().to_string_lossy().into_owned(),
            news: run.folder.news(since, now),
        });
        let all_running = self.list.is_some();
        let trouble = self.trouble.as_deref();
        serde_json::to_string(&Answer {
            version: self.version,
            now,
            all_running,
            trouble,
            runs: runs.collect(),
        })
    }

    fn refresh(&mut self, now: f64) {
        self.version += 1;
        self.read = now;
        self.find_jobs();
        self.find_runs();
        self.runs.iter_mut().for_each(|run| run.folder.refresh(self.version, now));
    }

    /// Adds runs that have appeared in, or one level below, the given folders. A folder without any is shown as a run itself.
    fn find_runs(&mut self) {
        for root in &self.roots {
            let found = runs::within(&root.folder);
            let place = self.runs.iter().position(|run| run.folder.folder() == root.folder);
            if place.is_some() && (found.is_empty() || found.contains(&root.folder)) {
                continue;
            }
            let new = |folder: &&PathBuf| !self.runs.iter().any(|run| run.folder.folder() == **folder);
            let new: Vec<_> = found.iter().filter(new).map(|folder| root.run(folder.clone())).collect();
            let mut new = if found.is_empty() { vec![root.run(root.folder.clone())] } else { new };
            if let Some(place) = place.filter(|_| !new.is_empty()) {
                self.runs[place] = new.remove(0);
            }
            self.runs.extend(new);
        }
    }

    /// Adds jobs that have started. Those that have ended stay visible.
    fn find_jobs(&mut self) {
        let Some(list) = &self.list else { return };
        match runs::running_in(list) {
            Ok(jobs) => {
                self.trouble = None;
                for job in jobs {
                    if !self.runs.iter().any(|run| run.folder.folder() == job.dir) {
                        self.runs.push(Run::new(job.name, job.dir));
                    }
                }
            }
            Err(error) => self.trouble = Some(error.to_string()),
        }
    }
}

impl Root {
    /// A run in it, or below it.
    fn run(&self, folder: PathBuf) -> Run {
        let below = folder.strip_prefix(&self.folder).unwrap_or(Path::new("")).to_string_lossy();
        let name = if below.is_empty() { self.name.clone() } else { format!("{}/{below}", self.name) };
        Run::new(name, folder)
    }
}

/// The last part of each path, or all of it if two would have the same name.
fn names(folders: &[PathBuf]) -> Vec<String> {
    let last = |folder: &Path| folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let is_taken =
        |name: &str| folders.iter().filter(|folder| last(folder).as_deref() == Some(name)).count() > 1;
    let name = |folder: &PathBuf| last(folder).filter(|name| !is_taken(name));
    folders
        .iter()
        .map(|folder| name(folder).unwrap_or_else(|| folder.to_string_lossy().into_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeRun;
    use serde_json::Value;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn answer(watch: &mut Watch, since: u64, now: f64) -> Value {
        serde_json::from_str(&watch.answer(since, now).unwrap()).unwrap()
    }

    #[test]
    fn a_browser_gets_all_and_then_what_is_new() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = FakeRun::create(folder.path(), 1).unwrap();
        (0..3).for_each(|_| run.step().unwrap());
        let mut watch = Watch::new(Runs::Folders(vec![folder.path().to_owned()]));
        let first = answer(&mut watch, 0, 10.0);
        run.step().unwrap();
        let points = |answer: &Value| answer["runs"][0]["curves"][1]["points"].as_array().map_or(0, Vec::len);
        assert_eq!(points(&first), 3);
        // Too soon to read again.
        assert_eq!(points(&answer(&mut watch, 1, 10.1)), 0);
        let second = answer(&mut watch, first["version"].as_u64().unwrap(), 11.0);
        assert_eq!((points(&second), &second["runs"][0]["curves"][1]["from"]), (1, &3.into()));
        // A browser with another process's page gets everything.
        assert_eq!(points(&answer(&mut watch, 999, 11.0)), 4);
    }

    #[test]
    fn a_folder_is_waited_for_and_its_runs_may_be_one_level_down() {
        let folder = tempfile::tempdir().unwrap();
        let exp = folder.path().join("exp");
        let mut watch = Watch::new(Runs::Folders(vec![exp.clone()]));
        let names = |sent: &Value| {
            let runs = sent["runs"].as_array().unwrap().iter();
            runs.map(|run| run["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let sent = answer(&mut watch, 0, 1.0);
        assert_eq!((names(&sent), &sent["runs"][0]["state"]), (vec!["exp".into()], &"waiting".into()));
        FakeRun::create(&exp.join("a"), 1).unwrap();
        assert_eq!(names(&answer(&mut watch, 0, 2.0)), ["exp/a"]);
        FakeRun::create(&exp.join("b"), 1).unwrap();
        assert_eq!(names(&answer(&mut watch, 0, 3.0)), ["exp/a", "exp/b"]);
        assert_eq!(watch.run(1).unwrap().1, exp.join("b"));
        assert_eq!(names(&answer(&mut watch, 0, 4.0)), ["exp/a", "exp/b"], "each once");
    }

    #[test]
    fn jobs_appear_as_they_begin_and_stay() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("own");
        let mut watch = Watch::with(Vec::new(), Some(own.clone()));
        assert_eq!(answer(&mut watch, 0, 1.0)["runs"].as_array().map(Vec::len), Some(0));
        let job = runs::List::within(&own).unwrap().add(Path::new("/nowhere/a"), "job a").unwrap();
        assert_eq!(answer(&mut watch, 0, 2.0)["runs"][0]["name"], "job a");
        drop(job);
        let sent = answer(&mut watch, 0, 3.0);
        assert_eq!((sent["runs"].as_array().map(Vec::len), &sent["trouble"]), (Some(1), &Value::Null));
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        let error = answer(&mut watch, 0, 4.0)["trouble"].to_string();
        assert!(error.contains("is not this user's alone"), "{error}");
    }

    #[test]
    fn names_of_runs_differ() {
        let folders = ["/x/a", "/x/b", "/y/b", "/"].map(PathBuf::from);
        assert_eq!(names(&folders), ["a", "/x/b", "/y/b", "/"]);
    }
}
