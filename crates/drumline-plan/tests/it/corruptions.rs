//! Random damage to programs is rejected, or proved harmless.
//!
//! What the verifier accepts must be right when the executor of `executor.rs` carries it out, by each rule of messages. What it
//! rejects must fail there by at least one of them.
//!
//! `DRUMLINE_CORRUPTIONS` sets how many, `DRUMLINE_CORRUPTIONS_SEED` which ones.

use std::collections::BTreeSet;

use drumline_plan::pipeline::{
    Action, Compute, Message, MessageRule, PipelineSize, Program, Schedule, Way, Work, lower, verify,
};

use super::executor::execute;

/// As many as a test makes in some seconds.
const USUAL: usize = 1_000_000;

/// A splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// The programs of the grid: as they are, for evaluation, with parameters that are gathered for the step or around each use,
/// and with computations that overlap.
fn programs() -> Vec<Program> {
    let sizes = [(1, 1), (1, 3), (2, 1), (2, 3), (3, 3), (4, 4)];
    let mut programs = Vec::new();
    for schedule in Schedule::ALL {
        for (ranks, micro_batches) in sizes {
            let size = PipelineSize { ranks, chunks: schedule.default_chunks(), micro_batches };
            let program = schedule.program(size).unwrap();
            programs.push(program.forward_only());
            programs.push(gathered(&program));
            programs.push(gathered_in_between(&program));
            let overlapping = overlapping(&program);
            programs.push(gathered_in_between(&overlapping));
            programs.push(overlapping);
            programs.push(program);
        }
    }
    programs
}

fn gathered(program: &Program) -> Program {
    let mut program = program.clone();
    for rank in 0..program.rows.len() {
        for stage in program.stages.stages_of(rank) {
            program.rows[rank].insert(0, Action::Unshard(stage));
            program.rows[rank].push(Action::Reshard(stage));
        }
    }
    program
}

/// Parameters are gathered before a use and freed after it, unless one of the next two actions uses them again.
fn gathered_in_between(program: &Program) -> Program {
    let uses = |action: &Action, stage: usize| action.works().any(|work| work.stage == stage);
    let mut program = program.clone();
    for row in &mut program.rows {
        let mut with = Vec::new();
        let mut gathered = BTreeSet::new();
        for (at, action) in row.iter().enumerate() {
            let stages: BTreeSet<usize> = action.works().map(|work| work.stage).collect();
            with.extend(stages.iter().filter(|stage| gathered.insert(**stage)).copied().map(Action::Unshard));
            with.push(*action);
            let next = &row[at + 1..row.len().min(at + 3)];
            for stage in gathered.clone() {
                if !next.iter().any(|action| uses(action, stage)) {
                    gathered.remove(&stage);
                    with.push(Action::Reshard(stage));
                }
            }
        }
        *row = with;
    }
    program
}

/// Forwards and backwards that are neighbours overlap, where the program can still be carried out.
fn overlapping(program: &Program) -> Program {
    let mut program = program.clone();
    program.rows.iter_mut().for_each(|row| row.retain(|action| action.works().next().is_some()));
    let is_forward = |work: Work| work.compute == Compute::Forward;
    for rank in 0..program.rows.len() {
        let mut at = 0;
        while let Some(&[Action::Compute(first), Action::Compute(second)]) =
            program.rows[rank].get(at..at + 2)
        {
            if is_forward(first) != is_forward(second) {
                let mut merged = program.clone();
                merged.rows[rank].splice(at..at + 2, [Action::Overlap(first, second)]);
                if lower(&merged).is_ok_and(|lowered| verify(&lowered).is_ok()) {
                    program = merged;
                }
            }
            at += 1;
        }
    }
    lower(&program).unwrap()
}

/// The same thing of another stage, micro-batch, direction or kind.
fn retargeted(action: Action, program: &Program, random: &mut Random) -> Action {
    let stage = random.below(program.stages.num_stages() + 1);
    let micro_batch = random.below(program.num_micro_batches + 1);
    let what = random.below(3);
    let message = |message: Message, random: &mut Random| match what {
        0 => Message { stage, ..message },
        1 => Message { micro_batch, ..message },
        _ => Message { way: random.of(&Way::ALL), ..message },
    };
    match action {
        Action::Compute(work) => Action::Compute(match what {
            0 => Work { stage, ..work },
            1 => Work { micro_batch, ..work },
            _ => Work { compute: random.of(&Compute::ALL), ..work },
        }),
        Action::Send(sent) if random.below(4) == 0 => Action::Receive(sent),
        Action::Send(sent) => Action::Send(message(sent, random)),
        Action::Receive(received) if random.below(4) == 0 => Action::Send(received),
        Action::Receive(received) => Action::Receive(message(received, random)),
        Action::Overlap(first, second) => match what {
            0 => Action::Overlap(second, first),
            1 => Action::Overlap(Work { stage, ..first }, second),
            _ => Action::Compute(first),
        },
        Action::Unshard(_) | Action::Reshard(_) | Action::ReduceGrad(_) => {
            random.of(&[Action::Unshard(stage), Action::Reshard(stage), Action::ReduceGrad(stage)])
        }
    }
}

/// Damages a program in one place or two.
fn damage(program: &mut Program, random: &mut Random) -> String {
    let ranks = program.rows.len();
    let rank =
        (0..4 * ranks).map(|_| random.below(ranks)).find(|rank| !program.rows[*rank].is_empty()).unwrap_or(0);
    let at = random.below(program.rows[rank].len().max(1));
    let kind = random.below(8);
    match kind {
        0 => {
            let other = random.below(program.rows[rank].len());
            program.rows[rank].swap(at, other);
        }
        1 => {
            // Neighbours, which is most often harmless.
            let next = (at + 1).min(program.rows[rank].len() - 1);
            program.rows[rank].swap(at, next);
        }
        2 => {
            program.rows[rank].remove(at);
        }
        3 => {
            let copy = program.rows[rank][at];
            let to = random.below(program.rows[rank].len() + 1);
            program.rows[rank].insert(to, copy);
        }
        4 => program.rows[rank][at] = retargeted(program.rows[rank][at], program, random),
        5 => {
            let moved = program.rows[rank].remove(at);
            let to = random.below(program.rows[rank].len() + 1);
            program.rows[rank].insert(to, moved);
        }
        6 => {
            // Two neighbours become one, if they are computations.
            let row = &mut program.rows[rank];
            if let Some(&[Action::Compute(first), Action::Compute(second)]) = row.get(at..at + 2) {
                row.splice(at..at + 2, [Action::Overlap(first, second)]);
            } else {
                row.remove(at);
            }
        }
        _ => {
            let moved = program.rows[rank].remove(at);
            let other = random.below(ranks);
            let to = random.below(program.rows[other].len() + 1);
            program.rows[other].insert(to, moved);
        }
    }
    format!("damage {kind} at {at} of rank {rank}")
}

/// Whether all rules lead to the right gradients.
fn is_right(program: &Program) -> bool {
    MessageRule::ALL.into_iter().all(|rule| execute(program, rule).is_ok())
}

#[test]
fn programs_have_what_is_damaged() {
    let programs = programs();
    let holding = |is: fn(&Action) -> bool| {
        programs.iter().filter(|program| program.rows.iter().flatten().any(is)).count()
    };
    let overlapping = holding(|action| matches!(action, Action::Overlap(..)));
    assert!(overlapping > programs.len() / 10, "{overlapping} of {} programs", programs.len());
    let gathers = |program: &&Program| {
        let is_unshard = |action: &&Action| matches!(action, Action::Unshard(_));
        program.rows.iter().flatten().filter(is_unshard).count() > program.stages.num_stages()
    };
    assert!(programs.iter().filter(gathers).count() > programs.len() / 5, "stages that are gathered again");
}

#[test]
fn the_executor_agrees_on_whole_programs() {
    for program in programs() {
        assert!(verify(&program).is_ok());
        for rule in MessageRule::ALL {
            assert_eq!(
                execute(&program, rule),
                Ok(()),
                "{rule}: {}",
                program.to_csv(drumline_plan::pipeline::CsvForm::All)
            );
        }
    }
}

#[test]
fn damage_is_rejected_or_harmless() {
    let count = std::env::var("DRUMLINE_CORRUPTIONS").map_or(USUAL, |text| text.parse().unwrap());
    let seed = std::env::var("DRUMLINE_CORRUPTIONS_SEED").map_or(1, |text| text.parse().unwrap());
    let programs = programs();
    let mut random = Random(seed);
    let mut harmless = 0;
    for number in 0..count {
        let whole = &programs[number % programs.len()];
        let mut damaged = whole.clone();
        let mut what = damage(&mut damaged, &mut random);
        if random.below(4) == 0 && damaged.rows.iter().all(|row| !row.is_empty()) {
            what += &damage(&mut damaged, &mut random);
        }
        let verdict = verify(&damaged).map(|_| ());
        let right = is_right(&damaged);
        harmless += usize::from(right);
        assert_eq!(
            verdict.is_ok(),
            right,
            "{what}: {verdict:?}\n{}",
            damaged.to_csv(drumline_plan::pipeline::CsvForm::All)
        );
    }
    println!("{count} damaged programs: {} rejected, {harmless} harmless", count - harmless);
    assert!(harmless > count / 100 && harmless < count / 2, "{harmless} of {count} harmless: no control");
}
