//! The pictures of every collective.

use std::process::{Command, Output};
use std::time::Duration;

use drumline_launch::LocalJob;

const COLLECTIVES: &str = env!("CARGO_BIN_EXE_collectives");

fn collectives(args: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command
        .args(["60", COLLECTIVES])
        .args(args)
        .env_remove("RANK")
        .env_remove("DRUMLINE_TRANSPORT")
        .output()
        .unwrap()
}

/// What it says on stderr when it refuses to start.
fn refused(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{said}");
    assert!(said.starts_with("error: ") && said.lines().count() == 1, "one line, no backtrace: {said}");
    said
}

/// The lines below a heading, up to the next.
fn below<'a>(text: &'a str, heading: &str) -> Vec<&'a str> {
    let mut parts = text.split("\n── ").filter(|part| part.starts_with(&format!("{heading} ─")));
    let part = parts.next().unwrap_or_else(|| panic!("no {heading} in:\n{text}"));
    assert!(parts.next().is_none(), "{heading} is there twice");
    part.lines().skip(1).collect()
}

/// The rows of a picture: of each rank, what it held before and after.
fn picture(text: &str, heading: &str) -> Vec<(String, String)> {
    let rows = below(text, heading).into_iter().filter_map(|line| line.trim().strip_prefix("rank "));
    let halves = rows.filter_map(|row| row[1..].split_once("─▶"));
    halves.map(|(before, after)| (before.trim().to_owned(), after.trim().to_owned())).collect()
}

fn afters(text: &str, heading: &str) -> Vec<String> {
    picture(text, heading).into_iter().map(|(_, after)| after).collect()
}

#[test]
fn the_pictures_of_four_ranks_are_right() {
    let output = collectives(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains('\x1b'), "no colours when piped");
    let rows = ["[ 1][ 2][ 3][ 4]", "[11][12][13][14]", "[21][22][23][24]", "[31][32][33][34]"];
    let (sums, nothing) = ("[64][68][72][76]", "nothing");
    for heading in ["broadcast", "all_reduce", "scatter", "all_to_all"] {
        let befores: Vec<_> = picture(&text, heading).into_iter().map(|(before, _)| before).collect();
        assert_eq!(befores, rows, "{heading}");
    }
    assert_eq!(afters(&text, "broadcast"), [rows[0]; 4]);
    assert_eq!(afters(&text, "reduce"), [sums, rows[1], rows[2], rows[3]]);
    assert_eq!(afters(&text, "all_reduce"), [sums; 4]);
    assert_eq!(afters(&text, "gather"), ["[ 1][11][21][31]", nothing, nothing, nothing]);
    assert_eq!(afters(&text, "all_gather"), ["[ 1][11][21][31]"; 4]);
    assert_eq!(afters(&text, "scatter"), ["[ 1]", "[ 2]", "[ 3]", "[ 4]"]);
    assert_eq!(afters(&text, "reduce_scatter"), ["[64]", "[68]", "[72]", "[76]"]);
    let columns = ["[ 1][11][21][31]", "[ 2][12][22][32]", "[ 3][13][23][33]", "[ 4][14][24][34]"];
    assert_eq!(afters(&text, "all_to_all"), columns);
    assert_eq!(afters(&text, "send and recv, in a ring"), ["[31]", "[ 1]", "[11]", "[21]"]);
    let (even, odd) = ("[22][24][26][28]", "[42][44][46][48]");
    assert_eq!(afters(&text, "new_group"), [even, odd, even, odd]);
    let disagreement = below(&text, "and when ranks disagree?").join("\n");
    assert!(
        disagreement.contains("made different calls") && disagreement.contains("disagreement.rs:"),
        "{disagreement}"
    );
    assert_eq!(below(&text, "barrier").iter().filter(|line| line.contains("left at")).count(), 4);
}

#[test]
fn the_number_of_ranks_can_be_chosen() {
    for ranks in ["2", "5"] {
        let output = collectives(&[ranks]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(afters(&text, "all_reduce").len().to_string(), ranks);
        assert!(ranks != "2" || !text.to_lowercase().contains("rank 2"), "{text}");
    }
    for (args, advice) in
        [(&["1"][..], "try 4"), (&["many"], "try 4"), (&["0"], "got 0; try 4"), (&["4", "5"], "try --help")]
    {
        let said = refused(&collectives(args));
        assert!(said.contains(advice), "{said}");
    }
}

#[test]
fn help_is_given() {
    let output = collectives(&["--help"]);
    assert!(
        output.status.success()
            && String::from_utf8_lossy(&output.stdout).contains("Usage: collectives [RANKS]")
    );
}

#[test]
fn a_bad_environment_is_reported_once() {
    let mut command = Command::new("timeout");
    command.args(["60", COLLECTIVES]).env_remove("RANK").env("DRUMLINE_TRANSPORT", "banana");
    let said = refused(&command.env("RUST_BACKTRACE", "1").output().unwrap());
    assert!(said.contains("no transport `banana`; try auto, shm or tcp"), "{said}");
}

#[test]
fn a_launcher_may_start_the_ranks() {
    let job = LocalJob::new(3, COLLECTIVES, [] as [&str; 0]).output(drumline_launch::Output::Capture);
    let report = job.deadline(Duration::from_secs(60)).start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    assert_eq!(afters(&report.ranks[0].stdout_text(), "broadcast").len(), 3);
    assert!(report.ranks[1..].iter().all(|rank| rank.stdout.is_empty()), "only rank 0 prints");
}
