//! The thread that reads and writes units, and the two buffers in which they are stepped.
//!
//! ```text
//!   turn           0        1        2        3          turn t uses buffer t mod 2
//!   main thread    step 0   step 1   step 2   step 3
//!   this thread    read 1   write 0  write 1  write 2
//!                           read 2   read 3
//! ```
//! It does one job after the other, in the order in which they are given; a file divides large ones among threads of
//! its own.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use drumline_torch::{Pages, SwapError, SwapFile};

use super::Result;
use crate::error::ParallelError;

/// One unit is stepped while another one is moved.
pub(super) const NUM_BUFFERS: usize = 2;

/// What is read for a turn: the pages of a unit, or nothing if it has no state yet.
pub(super) type Transfer = Option<Range<usize>>;

/// A job: first it writes, then it reads into the same buffer.
struct Job {
    buffer: usize,
    write: Option<Range<usize>>,
    read: Option<Range<usize>>,
}

/// The thread. Dropping it joins the thread.
pub(super) struct Mover {
    buffers: Vec<Pages>,
    jobs: Option<Sender<Job>>,
    done: Receiver<std::result::Result<(), SwapError>>,
    num_sent: usize,
    num_done: usize,
    failure: Option<ParallelError>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Starts the thread, with buffers for units of these sizes.
    pub(super) fn new(file: &Arc<SwapFile>, sizes: &[usize]) -> Result<Self> {
        let mut largest = sizes.to_vec();
        largest.sort_unstable_by_key(|size| std::cmp::Reverse(*size));
        largest.resize(NUM_BUFFERS, 0);
        let what = "a buffer for offloaded state";
        let buffer = |size: &usize| {
            Pages::zeros(*size).map_err(|cause| ParallelError::Memory { what, bytes: *size, cause })
        };
        let buffers: Vec<Pages> = largest.iter().map(buffer).collect::<Result<_>>()?;
        let ((jobs, work), (results, done)) = (channel(), channel());
        let (file, own) = (file.clone(), buffers.clone());
        let serve = move || serve(&file, &own, &work, &results);
        let thread = std::thread::Builder::new().name("offload".into()).spawn(serve);
        let what = "the thread that moves offloaded state";
        let thread = thread.map_err(|cause| ParallelError::Thread { what, cause })?;
        Ok(Self {
            buffers,
            jobs: Some(jobs),
            done,
            num_sent: 0,
            num_done: 0,
            failure: None,
            thread: Some(thread),
        })
    }

    fn send(&mut self, job: Job) {
        // The thread lives until the sender is dropped.
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok()) {
            self.num_sent += 1;
        }
    }

    /// Begins the reads of the first turns.
    pub(super) fn begin(&mut self, transfers: &[Transfer]) {
        (self.num_sent, self.num_done) = (0, 0);
        for (buffer, read) in transfers.iter().take(NUM_BUFFERS).enumerate() {
            self.send(Job { buffer, write: None, read: read.clone() });
        }
    }

    /// The buffer of a turn, when what it needs is there.
    pub(super) fn wait_for(&mut self, turn: usize) -> Result<Pages> {
        while self.num_done <= turn && self.failure.is_none() {
            self.receive();
        }
        self.check()?;
        Ok(self.buffers[turn % NUM_BUFFERS].clone())
    }

    /// A turn has ended: writes its unit, and reads what the turn after the next needs into the same buffer.
    pub(super) fn write(&mut self, turn: usize, unit: Range<usize>, next: Option<&Transfer>) {
        let read = next.cloned().flatten();
        self.send(Job { buffer: turn % NUM_BUFFERS, write: Some(unit), read });
    }

    /// Waits until everything is written.
    pub(super) fn finish(&mut self) -> Result {
        self.wait_for_all();
        self.check()
    }

    /// The same, whether it succeeds or not.
    pub(super) fn wait_for_all(&mut self) {
        while self.num_done < self.num_sent {
            self.receive();
        }
    }

    fn receive(&mut self) {
        self.num_done += 1;
        let error = match self.done.recv() {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.into(),
            Err(_) => ParallelError::Internal { what: "the thread that moves offloaded state has ended" },
        };
        self.failure.get_or_insert(error);
    }

    fn check(&mut self) -> Result {
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It has returned its errors already.
            let _ = thread.join();
        }
    }
}

fn serve(
    file: &SwapFile,
    buffers: &[Pages],
    jobs: &Receiver<Job>,
    results: &Sender<std::result::Result<(), SwapError>>,
) {
    for Job { buffer, write, read } in jobs {
        let buffer = &buffers[buffer];
        let written =
            write.map_or(Ok(()), |unit| file.write(unit.start as u64, buffer.bytes_mut(0..unit.len())));
        let moved = written.and_then(|()| {
            read.map_or(Ok(()), |unit| file.read(unit.start as u64, buffer.bytes_mut(0..unit.len())))
        });
        if results.send(moved).is_err() {
            return;
        }
    }
}

/// The order of turns in which the largest unit comes into the first buffer, which is the larger one.
pub(super) fn in_turns(mut units: Vec<usize>, sizes: &[usize]) -> Vec<usize> {
    let largest = (0..sizes.len()).rev().max_by_key(|unit| sizes[*unit]);
    let turn = units.iter().position(|unit| Some(*unit) == largest);
    if let Some(turn) = turn.filter(|turn| turn % NUM_BUFFERS == 1) {
        units.swap(turn, turn - 1);
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_torch::PAGE;

    #[test]
    fn the_largest_unit_is_never_in_the_second_buffer() {
        let sizes = [1, 5, 2, 5, 3];
        assert_eq!(in_turns(vec![0, 1, 2, 3, 4], &sizes), [1, 0, 2, 3, 4]);
        assert_eq!(in_turns(vec![0, 2, 3], &sizes), [0, 2, 3]);
        assert_eq!(in_turns(vec![1, 2], &sizes), [1, 2]);
        assert_eq!(in_turns(Vec::new(), &[]), Vec::<usize>::new());
        // All others fit into the second one.
        let mut largest = sizes;
        largest.sort_unstable();
        for order in [vec![0, 1, 2, 3, 4], vec![1, 3], vec![3, 1], vec![4, 1, 3]] {
            for (turn, unit) in in_turns(order, &sizes).into_iter().enumerate() {
                assert!(sizes[unit] <= largest[sizes.len() - 1 - turn % NUM_BUFFERS]);
            }
        }
    }

    #[test]
    fn units_pass_through_two_buffers() {
        let folder = tempfile::tempdir().unwrap();
        let num_units = 5;
        let file = Arc::new(SwapFile::new(folder.path(), (num_units * PAGE) as u64).unwrap());
        let mut mover = Mover::new(&file, &vec![PAGE; num_units]).unwrap();
        let regions: Vec<Transfer> =
            (0..num_units).map(|unit| Some(unit * PAGE..(unit + 1) * PAGE)).collect();
        for round in 1..4u8 {
            mover.begin(&regions);
            for (turn, region) in regions.iter().enumerate() {
                let buffer = mover.wait_for(turn).unwrap();
                let first = &mut buffer.bytes_mut(0..1)[0];
                assert_eq!(*first, (round - 1) * (turn as u8 + 1));
                *first += turn as u8 + 1;
                mover.write(turn, region.clone().unwrap(), regions.get(turn + NUM_BUFFERS));
            }
            mover.finish().unwrap();
        }
        let beyond = Some(num_units * PAGE..(num_units + 1) * PAGE);
        mover.begin(&[beyond]);
        let error = mover.wait_for(0).unwrap_err().to_string();
        assert!(error.contains("ends before byte 24576"), "{error}");
    }
}
