//! The operations: the call itself, what it does, its use in training, and the expected result.

use drumline_comm::{CommError, P2p, ProcessGroup, ReduceOp, Source};

/// The numbers of one rank. Rank 2 starts with 21, 22, 23, …: the first digit says where a number came from.
pub(crate) type Cells = Vec<i32>;

pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) does: &'static str,
    pub(crate) used_for: &'static str,
    pub(crate) cells: Start,
    pub(crate) run: fn(&ProcessGroup, &[i32]) -> Result<Cells, CommError>,
    /// What a rank must hold afterwards, for what all ranks held before.
    pub(crate) expected: fn(usize, &[Cells]) -> Cells,
    /// Whether numbers are added up on the way.
    pub(crate) adds: bool,
}

/// How many numbers a rank starts with.
pub(crate) enum Start {
    One,
    OnePerRank,
}

impl Start {
    pub(crate) fn count(&self, group: &ProcessGroup) -> usize {
        match self {
            Start::One => 1,
            Start::OnePerRank => group.size(),
        }
    }
}

pub(crate) fn held_at_first(rank: usize, count: usize) -> Cells {
    (1..=count).map(|i| (10 * rank + i) as i32).collect()
}

/// The rank that started with this number.
pub(crate) fn origin(number: i32) -> usize {
    (number - 1) as usize / 10
}

const ROOT: usize = 0;

pub(crate) const STEPS: &[Step] = &[
    Step {
        name: "broadcast",
        does: "One rank's data, here rank 0's, is copied to all ranks.",
        used_for: "all ranks begin with the same weights.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let mut data = mine.to_vec();
            group.broadcast(&mut data, ROOT)?;
            Ok(data)
        },
        expected: |_, before| before[ROOT].clone(),
        adds: false,
    },
    Step {
        name: "reduce",
        does: "The data of all ranks is added up; one rank, here rank 0, gets the sum.",
        used_for: "the rank that writes the log adds up loss and hits of all ranks.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let mut data = mine.to_vec();
            group.reduce(&mut data, ROOT, ReduceOp::Sum)?;
            Ok(data)
        },
        expected: |rank, before| if rank == ROOT { sum(before) } else { before[rank].clone() },
        adds: true,
    },
    Step {
        name: "all_reduce",
        does: "The data of all ranks is added up, and every rank gets the sum.",
        used_for: "after each backward pass all ranks average their gradients.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let mut data = mine.to_vec();
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            Ok(data)
        },
        expected: |_, before| sum(before),
        adds: true,
    },
    Step {
        name: "gather",
        does: "Every rank's data is laid side by side on one rank, here rank 0.",
        used_for: "predictions of all ranks are brought together to be saved.",
        cells: Start::One,
        run: |group, mine| {
            let mut all = vec![0; if group.rank() == ROOT { group.size() } else { 0 }];
            group.gather(mine, (group.rank() == ROOT).then_some(&mut all[..]), ROOT)?;
            Ok(all)
        },
        expected: |rank, before| if rank == ROOT { before.concat() } else { Vec::new() },
        adds: false,
    },
    Step {
        name: "all_gather",
        does: "Every rank's data is laid side by side on every rank.",
        used_for: "weights kept in parts (FSDP) are put together just before they are needed.",
        cells: Start::One,
        run: |group, mine| {
            let mut all = vec![0; group.size()];
            group.all_gather(mine, &mut all)?;
            Ok(all)
        },
        expected: |_, before| before.concat(),
        adds: false,
    },
    Step {
        name: "scatter",
        does: "The data of one rank, here rank 0, is dealt out: a part for each rank.",
        used_for: "one rank has read the data and gives each rank its share.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let mut part = vec![0];
            group.scatter((group.rank() == ROOT).then_some(mine), &mut part, ROOT)?;
            Ok(part)
        },
        expected: |rank, before| vec![before[ROOT][rank]],
        adds: false,
    },
    Step {
        name: "reduce_scatter",
        does: "The data of all ranks is added up, and the sum is dealt out: a part for each rank.",
        used_for: "with FSDP a rank keeps only the gradients of its own part of the weights.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let mut part = vec![0];
            group.reduce_scatter(mine, &mut part, ReduceOp::Sum)?;
            Ok(part)
        },
        expected: |rank, before| vec![sum(before)[rank]],
        adds: true,
    },
    Step {
        name: "all_to_all",
        does: "Every rank has a part for every rank: rows become columns.",
        used_for: "in a mixture of experts each token travels to the rank that has its expert.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let mut theirs = vec![0; group.size()];
            group.all_to_all(mine, &mut theirs)?;
            Ok(theirs)
        },
        expected: |rank, before| before.iter().map(|row| row[rank]).collect(),
        adds: false,
    },
    Step {
        name: "send and recv, in a ring",
        does: "Every rank sends its data to the next one, and the last one to the first.",
        used_for: "a pipeline hands activations to the stage that follows.",
        cells: Start::One,
        run: |group, mine| {
            let (rank, size) = (group.rank(), group.size());
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            let mut got = vec![0];
            group.batch(vec![P2p::send(mine, next, 0), P2p::recv(&mut got, Source::Rank(previous), 0)])?;
            Ok(got)
        },
        expected: |rank, before| before[(rank + before.len() - 1) % before.len()].clone(),
        adds: false,
    },
    Step {
        name: "new_group",
        does: "Ranks form smaller groups; here even and odd ranks each all_reduce among themselves.",
        used_for: "several kinds of parallelism at once, each in its own groups.",
        cells: Start::OnePerRank,
        run: |group, mine| {
            let (even, odd): (Vec<_>, Vec<_>) = (0..group.size()).partition(|rank| rank % 2 == 0);
            let mut data = mine.to_vec();
            // All ranks take part in making each group; those outside get `None`.
            for members in [even, odd] {
                if let Some(part) = group.new_group(&members)? {
                    part.all_reduce(&mut data, ReduceOp::Sum)?;
                }
            }
            Ok(data)
        },
        expected: |rank, before| {
            let like_me: Vec<Cells> = before.iter().skip(rank % 2).step_by(2).cloned().collect();
            sum(&like_me)
        },
        adds: true,
    },
];

/// The numbers, column by column.
fn sum(rows: &[Cells]) -> Cells {
    (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column]).sum()).collect()
}
