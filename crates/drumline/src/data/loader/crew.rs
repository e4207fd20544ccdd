//! The workers of an epoch: threads that make batches ahead of the caller, who gets them in order.
//!
//! A worker takes the number of the next batch, and with it a *slot*, makes the batch, and puts it there. The caller
//! takes from the first slot. There are never more than `capacity` slots, so that a slow caller holds the workers back.
//! After an error no new batch is begun. Stopping waits for the batches in progress, or less if the data set checks
//! `stop`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::plan::Plan;
use super::{Dataset, LoaderError};

pub(super) struct Crew<B> {
    desk: Arc<Desk<B>>,
    threads: Vec<JoinHandle<()>>,
}

struct Desk<B> {
    slots: Mutex<Slots<B>>,
    /// For workers: a slot may be free, or there is no more work.
    room: Condvar,
    /// For the caller: the first slot is ready.
    ready: Condvar,
    /// For data sets: the batches are no longer needed.
    stop: AtomicBool,
}

struct Slots<B> {
    /// The slots, beginning with the next one to take; `None` while a worker makes the batch.
    made: VecDeque<Option<Result<B, LoaderError>>>,
    /// The number of the first slot's batch.
    first: usize,
    capacity: usize,
    /// No batch from this number on is begun.
    end: usize,
}

impl<B: Send + 'static> Crew<B> {
    pub(super) fn start<D: Dataset<Batch = B> + 'static>(plan: &Arc<Plan<D>>) -> Result<Self, LoaderError> {
        let (workers, end) = (plan.options.workers.min(plan.num_batches()), plan.num_batches());
        let capacity = workers * plan.options.prefetch;
        let slots = Mutex::new(Slots { made: VecDeque::with_capacity(capacity), first: 0, capacity, end });
        let desk = Arc::new(Desk { slots, room: Condvar::new(), ready: Condvar::new(), stop: false.into() });
        // If a thread cannot be started, dropping this stops those that were started.
        let mut crew = Self { desk, threads: Vec::with_capacity(workers) };
        for worker in 0..workers {
            let (desk, plan) = (Arc::clone(&crew.desk), Arc::clone(plan));
            let thread = std::thread::Builder::new().name(format!("loader {worker}"));
            let thread = thread.spawn(move || work(&desk, &plan));
            crew.threads.push(thread.map_err(|cause| LoaderError::Thread { worker, cause })?);
        }
        Ok(crew)
    }

    /// The next batch in order; `None` after the last.
    pub(super) fn take(&mut self) -> Option<Result<B, LoaderError>> {
        let mut slots = self.desk.lock();
        loop {
            if slots.first >= slots.end {
                return None;
            }
            if let Some(batch) = slots.made.front_mut().and_then(Option::take) {
                slots.made.pop_front();
                slots.first += 1;
                drop(slots);
                self.desk.room.notify_one();
                return Some(batch);
            }
            slots = self.desk.ready.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<B> Drop for Crew<B> {
    fn drop(&mut self) {
        self.desk.stop.store(true, Ordering::Relaxed);
        self.desk.lock().end = 0;
        self.desk.room.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of the data set are caught before they get here.
            let _ = thread.join();
        }
    }
}

impl<B> Desk<B> {
    fn lock(&self) -> MutexGuard<'_, Slots<B>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a batch to make, with a slot for it; `None` if there is no more to do.
    fn begin(&self) -> Option<usize> {
        let mut slots = self.lock();
        loop {
            let number = slots.first + slots.made.len();
            if number >= slots.end {
                return None;
            }
            if slots.made.len() < slots.capacity {
                slots.made.push_back(None);
                return Some(number);
            }
            slots = self.room.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn put(&self, number: usize, batch: Result<B, LoaderError>) {
        let mut slots = self.lock();
        if batch.is_err() {
            slots.end = slots.end.min(number + 1);
            self.room.notify_all();
        }
        let place = number - slots.first;
        slots.made[place] = Some(batch);
        drop(slots);
        if place == 0 {
            self.ready.notify_one();
        }
    }
}

fn work<D: Dataset>(desk: &Desk<D::Batch>, plan: &Plan<D>) {
    while let Some(number) = desk.begin() {
        match plan.load(number, &desk.stop).transpose() {
            Some(batch) => desk.put(number, batch),
            None => return,
        }
    }
}
