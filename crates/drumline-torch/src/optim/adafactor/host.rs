//! Adafactor's step of parameters in host memory, in jobs for threads.
//!
//! ```text
//!   one matrix   jobs of rows: their means, and sums of columns ─▶ of all ranks ─▶ means of columns
//!   matrices     jobs of whole matrices, each with its own columns
//!   elements     jobs of elements
//! ```

use super::super::work::{Slices, Work};
use super::{Change, StepOf, Sums};
use crate::error::TorchError;
use crate::kernels::adafactor::{
    Matrices, Variance, change_weights, element_means, lerp, row_means, squared_directions,
};
use crate::kernels::floats::elements_mut;
use crate::kernels::{Elements, JOB, on_threads};

/// The columns of a parameter that is one matrix, whose sums are those of all ranks.
pub(super) fn columns_of(shape: &[i64]) -> Option<usize> {
    if let [_, columns] = shape { Some(*columns as usize) } else { None }
}

/// The jobs of one parameter.
pub(super) struct Shared<'a> {
    of: StepOf,
    jobs: Vec<Job<'a>>,
    /// The means of the columns, if the parameter is one matrix.
    columns: Option<&'a mut [f32]>,
    /// The mean of the rows of all ranks, if the parameter is one matrix.
    mean_of_rows: [f32; 1],
}

/// A part of a parameter.
pub(super) struct Job<'a> {
    elements: Elements<'a>,
    means: Means<'a>,
    /// The sum of squared weights, then of squared directions.
    squares: f64,
}

/// The running means of a job.
enum Means<'a> {
    /// Of some rows of a matrix, with the sums of their columns.
    Rows { rows: &'a mut [f32], row_len: usize, columns: Vec<f64> },
    /// Of whole matrices, with the means of their rows.
    Matrices { shape: Matrices, rows: &'a mut [f32], columns: &'a mut [f32], means_of_rows: Vec<f32> },
    /// Of each element.
    Elements(&'a mut [f32]),
}

/// Cuts a parameter into jobs.
pub(super) fn jobs_of<'a>(of: StepOf, work: &'a mut Work) -> Result<Shared<'a>, TorchError> {
    let (size, whole_columns) = (work.weights.size(), columns_of(&work.whole));
    let Slices { elements, kept } = work.slices()?;
    let shared = |jobs, columns| Shared { of, jobs, columns, mean_of_rows: [0.0] };
    if elements.len() == 0 {
        return Ok(shared(Vec::new(), None));
    }
    match (kept, whole_columns, &size[..]) {
        ([_, rows, columns], Some(row_len), _) => {
            let jobs = jobs_of_rows(elements, elements_mut(rows)?, row_len);
            Ok(shared(jobs, Some(elements_mut(columns)?)))
        }
        ([_, rows, columns], None, [.., num_rows, row_len]) => {
            let shape = Matrices { num_rows: *num_rows as usize, row_len: *row_len as usize };
            let jobs = jobs_of_matrices(elements, shape, elements_mut(rows)?, elements_mut(columns)?);
            Ok(shared(jobs, None))
        }
        ([_, means], ..) => Ok(shared(jobs_of_elements(elements, elements_mut(means)?), None)),
        _ => Err(TorchError::Internal { what: "Adafactor keeps another number of tensors" }),
    }
}

fn jobs_of_rows<'a>(mut elements: Elements<'a>, mut rows: &'a mut [f32], row_len: usize) -> Vec<Job<'a>> {
    let (mut jobs, most) = (Vec::new(), (JOB / row_len).max(1));
    while !rows.is_empty() {
        let num = most.min(rows.len());
        let (own, others) = elements.split_at(num * row_len);
        let (own_rows, other_rows) = rows.split_at_mut(num);
        let means = Means::Rows { rows: own_rows, row_len, columns: vec![0.0; row_len] };
        jobs.push(Job { elements: own, means, squares: 0.0 });
        (elements, rows) = (others, other_rows);
    }
    jobs
}

fn jobs_of_matrices<'a>(
    mut elements: Elements<'a>,
    shape: Matrices,
    mut rows: &'a mut [f32],
    mut columns: &'a mut [f32],
) -> Vec<Job<'a>> {
    let Matrices { num_rows, row_len } = shape;
    let (mut jobs, most) = (Vec::new(), (JOB / (num_rows * row_len)).max(1));
    while !rows.is_empty() {
        let num = most.min(rows.len() / num_rows);
        let (own, others) = elements.split_at(num * num_rows * row_len);
        let (own_rows, other_rows) = rows.split_at_mut(num * num_rows);
        let (own_columns, other_columns) = columns.split_at_mut(num * row_len);
        let means_of_rows = vec![0.0; num];
        let means = Means::Matrices { shape, rows: own_rows, columns: own_columns, means_of_rows };
        jobs.push(Job { elements: own, means, squares: 0.0 });
        (elements, rows, columns) = (others, other_rows, other_columns);
    }
    jobs
}

fn jobs_of_elements<'a>(mut elements: Elements<'a>, mut means: &'a mut [f32]) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    while !means.is_empty() {
        let num = JOB.min(means.len());
        let (own, others) = elements.split_at(num);
        let (own_means, other_means) = means.split_at_mut(num);
        jobs.push(Job { elements: own, means: Means::Elements(own_means), squares: 0.0 });
        (elements, means) = (others, other_means);
    }
    jobs
}

/// A job, and what it shares with the others of its parameter.
struct Task<'j, 'a> {
    of: StepOf,
    job: &'j mut Job<'a>,
    columns: &'j [f32],
    mean_of_rows: &'j [f32],
}

fn tasks<'j, 'a>(all: &'j mut [Shared<'a>]) -> Vec<Task<'j, 'a>> {
    let tasks = all.iter_mut().flat_map(|shared| {
        let Shared { of, jobs, columns, mean_of_rows } = shared;
        let (of, columns, mean_of_rows) = (*of, columns.as_deref().unwrap_or(&[]), &mean_of_rows[..]);
        jobs.iter_mut().map(move |job| Task { of, job, columns, mean_of_rows })
    });
    tasks.collect()
}

/// Updates the running means of rows and elements, and adds the sums of this rank.
pub(super) fn means(all: &mut [Shared<'_>], sums: &mut Sums) {
    on_threads(tasks(all), |task| task.job.update_means(task.of));
    for Shared { of, jobs, columns, .. } in all {
        let sums = sums.of_mut(of.index);
        for job in jobs {
            if let (Means::Rows { rows, columns: found, .. }, true) = (&job.means, columns.is_some()) {
                sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
                sums[found.len()] += rows.iter().map(|row| f64::from(*row)).sum::<f64>();
            }
            if let Some(sum) = sums.last_mut() {
                *sum += job.squares;
            }
        }
    }
}

/// Updates the means of columns by the sums of all ranks, and adds this rank's sums of squared directions.
pub(super) fn directions(all: &mut [Shared<'_>], sums: &Sums, least_mean: f64, directions: &mut [f64]) {
    for Shared { of, columns, mean_of_rows, .. } in &mut *all {
        let Some(columns) = columns else { continue };
        let sums = sums.of(of.index);
        for (column, sum) in columns.iter_mut().zip(sums) {
            *column = lerp(*column, (sum / of.num_rows) as f32, of.with.weight);
        }
        *mean_of_rows = [(sums[columns.len()] / of.num_rows).max(least_mean) as f32];
    }
    on_threads(tasks(all), |task| {
        let Task { of, job, columns, mean_of_rows } = task;
        if let Means::Matrices { means_of_rows, .. } = &mut job.means {
            means_of_rows.iter_mut().for_each(|mean| *mean = mean.max(least_mean as f32));
        }
        let variance = job.means.variance(columns, mean_of_rows);
        job.squares = squared_directions(&job.elements.grads, &variance, of.with);
    });
    for Shared { of, jobs, .. } in all {
        directions[of.index] += jobs.iter().map(|job| job.squares).sum::<f64>();
    }
}

/// Changes the weights.
pub(super) fn change(mut all: Vec<Shared<'_>>, change: &(dyn Fn(StepOf) -> Change + Sync)) {
    on_threads(tasks(&mut all), |task| {
        let Task { of, job, columns, mean_of_rows } = task;
        let variance = job.means.variance(columns, mean_of_rows);
        change_weights(&mut job.elements, &variance, of.with, change(of));
    });
}

impl Job<'_> {
    fn update_means(&mut self, of: StepOf) {
        let Self { elements, means, squares } = self;
        *squares = match means {
            Means::Rows { rows, row_len, columns } => {
                let shape = Matrices { num_rows: usize::MAX, row_len: *row_len };
                row_means(elements, shape, rows, columns, of.with)
            }
            Means::Matrices { shape, rows, columns, means_of_rows } => {
                let mut found = vec![0.0; columns.len()];
                let squares = row_means(elements, *shape, rows, &mut found, of.with);
                let num_rows = shape.num_rows as f64;
                for (column, sum) in columns.iter_mut().zip(found) {
                    *column = lerp(*column, (sum / num_rows) as f32, of.with.weight);
                }
                for (mean, rows) in means_of_rows.iter_mut().zip(rows.chunks(shape.num_rows)) {
                    *mean = (rows.iter().map(|row| f64::from(*row)).sum::<f64>() / num_rows) as f32;
                }
                squares
            }
            Means::Elements(means) => element_means(elements, means, of.with),
        };
    }
}

impl Means<'_> {
    fn variance<'v>(&'v self, shared_columns: &'v [f32], mean_of_rows: &'v [f32]) -> Variance<'v> {
        match self {
            Self::Rows { rows, row_len, .. } => Variance::Factored {
                shape: Matrices { num_rows: usize::MAX, row_len: *row_len },
                rows,
                columns: shared_columns,
                means_of_rows: mean_of_rows,
            },
            Self::Matrices { shape, rows, columns, means_of_rows } => {
                Variance::Factored { shape: *shape, rows, columns, means_of_rows }
            }
            Self::Elements(means) => Variance::Elements(means),
        }
    }
}
