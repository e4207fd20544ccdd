//! Draws on the terminal. A cell has the colour of the rank from which its number came; sums are inverted. Without
//! colours (piped, or `NO_COLOR` set) cells are in brackets.
//!
//! Only rank 0's painter prints anything.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use crate::steps::{Cells, Step, origin};

/// Light backgrounds of the 256-colour palette, one for each rank.
const PALETTE: [u8; 10] = [117, 156, 222, 218, 183, 159, 229, 216, 152, 188];
const WIDTH: usize = 78;

pub(crate) struct Painter {
    prints: bool,
    colours: bool,
}

impl Painter {
    pub(crate) fn for_stdout(rank: usize) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { prints: rank == 0, colours: std::io::stdout().is_terminal() && !no_color }
    }

    fn line(&self, text: &str) {
        if self.prints {
            // A closed pipe (`| head`) is no reason to fail.
            let _ = writeln!(std::io::stdout(), "{}", text.trim_end_matches(' '));
        }
    }

    pub(crate) fn title(&self, processes: &[u32]) {
        self.line(&format!(
            "{} processes talk to each other. Each has a number, its rank:\n",
            processes.len()
        ));
        for (rank, pid) in processes.iter().enumerate() {
            self.line(&format!("  {}  process {pid}", self.rank(rank)));
        }
        self.line("\nRank 1 starts with 11, 12, …, so a number shows where it came from.");
        if self.colours {
            self.line(&format!("Its colour shows it, too; sums look like this: {}", self.cell(64, 2, None)));
        }
    }

    fn heading(&self, name: &str) {
        let rule = "─".repeat(WIDTH.saturating_sub(name.chars().count() + 4));
        self.line(&format!("\n── {name} {rule}"));
    }

    pub(crate) fn step(&self, step: &Step, befores: &[Cells], afters: &[Cells]) {
        self.heading(step.name);
        self.line(&format!("{}\nIn training: {}\n", step.does, step.used_for));
        let numbers = befores.iter().chain(afters).flatten();
        let digits = numbers.map(|number| number.to_string().len()).max().unwrap_or(1);
        let width = (befores[0].len() * (digits + 2)).max("before".len());
        self.line(&format!("          {:width$}      after", "before"));
        for (rank, (before, after)) in befores.iter().zip(afters).enumerate() {
            let is_sum = |place: usize, number| step.adds && before.get(place) != Some(&number);
            let right = self.cells(after, digits, is_sum);
            let left = self.cells(before, digits, |_, _| false);
            let gap = " ".repeat(width - before.len() * (digits + 2));
            self.line(&format!("  {}  {left}{gap}  ─▶  {right}", self.rank(rank)));
        }
    }

    fn cells(&self, numbers: &[i32], digits: usize, is_sum: impl Fn(usize, i32) -> bool) -> String {
        if numbers.is_empty() {
            return "nothing".into();
        }
        let from = |place, number| (!is_sum(place, number)).then(|| origin(number));
        let cell = |(place, &number)| self.cell(number, digits, from(place, number));
        numbers.iter().enumerate().map(cell).collect()
    }

    fn rank(&self, rank: usize) -> String {
        self.painted(&format!("rank {rank}"), Some(rank))
    }

    fn cell(&self, number: i32, digits: usize, from: Option<usize>) -> String {
        let (left, right) = if self.colours { (' ', ' ') } else { ('[', ']') };
        self.painted(&format!("{left}{number:>digits$}{right}"), from)
    }

    fn painted(&self, text: &str, from: Option<usize>) -> String {
        match from {
            _ if !self.colours => text.to_owned(),
            Some(rank) => format!("\x1b[30;48;5;{}m{text}\x1b[0m", PALETTE[rank % PALETTE.len()]),
            None => format!("\x1b[7m{text}\x1b[0m"),
        }
    }

    pub(crate) fn barrier(&self, times: &[(Duration, Duration)]) {
        self.heading("barrier");
        self.line(
            "No rank leaves before all have come.\nIn training: rank 0 prepares the data; the others wait.\n",
        );
        let end = times.iter().map(|(_, went)| went.as_millis()).max().unwrap_or(0).max(1);
        for (rank, (came, went)) in times.iter().enumerate() {
            let (came, went) = (came.as_millis(), went.as_millis());
            let place = |millis: u128| (millis * 24 / end) as usize;
            let (walks, waits) = (" ".repeat(place(came)), "░".repeat(place(went) - place(came)));
            self.line(&format!(
                "  {}  {walks}▶{waits}▶  came at {came} ms, left at {went} ms",
                self.rank(rank)
            ));
        }
    }

    pub(crate) fn disagreement(&self, group: &str, error: &str) {
        self.heading("and when ranks disagree?");
        self.line("Rank 1 brings 3 numbers to an all_reduce, everybody else 4. Nobody hangs and nothing is");
        self.line("mixed up: every rank at once gets an error that says who called what, and where.\n");
        error.lines().for_each(|line| self.line(&format!("  {line}")));
        self.line(&format!(
            "\n`{group}` is a group's name: `world` is that of all ranks, the number counts those made from it."
        ));
    }

    pub(crate) fn farewell(&self) {
        self.heading("what to try next");
        self.line("More ranks:         cargo run --release -p drumline-examples --bin collectives -- 6");
        self.line("How fast they are:  cargo run --release -p drumline-cli -- bench all-reduce");
        self.line("The calls:          examples/src/bin/collectives/steps.rs");
    }
}
