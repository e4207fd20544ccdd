//! A store within one process: for ranks that are threads, and for tests.

use super::Store;
use super::error::StoreError;
use super::request::{Reply, Request};
use super::timed_out::timed_out;
use crate::core::Core;
use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A store in memory; a clone is the same store.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    core: Core<u64>,
    last_ticket: u64,
    waiting: HashMap<u64, Sender<Reply>>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Applies the request and delivers the answers to others. Returns its own answer, or the channel on which that
    /// will arrive.
    fn start(&mut self, request: Request) -> Result<Reply, (u64, Receiver<Reply>)> {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let mut own = None;
        let mut replies = Vec::new();
        self.core.apply(ticket, request, &mut replies);
        for (to, reply) in replies {
            if to == ticket {
                own = Some(reply);
            } else if let Some(waiting) = self.waiting.remove(&to) {
                // It may just have given up; then the reply is not needed.
                let _ = waiting.send(reply);
            }
        }
        own.ok_or_else(|| {
            let (sender, receiver) = channel();
            self.waiting.insert(ticket, sender);
            (ticket, receiver)
        })
    }

    /// Cancels a wait; `false` if it was already answered.
    fn cancel(&mut self, ticket: u64) -> bool {
        self.waiting.remove(&ticket);
        self.core.cancel(ticket)
    }
}

impl Store for MemoryStore {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        request.check_limits()?;
        // Only waits need the copy, for the error; other requests may be large.
        let wait = if request.waits() { request.clone() } else { Request::NumKeys };
        let began = Instant::now();
        let (ticket, receiver) = match self.state().start(request) {
            Ok(reply) => return Ok(reply),
            Err(parked) => parked,
        };
        let timeout = deadline.unwrap_or(began).saturating_duration_since(began);
        if let Ok(reply) = receiver.recv_timeout(timeout) {
            return Ok(reply);
        }
        let cancelled = self.state().cancel(ticket);
        match receiver.try_recv() {
            Ok(reply) if !cancelled => Ok(reply),
            _ => Err(timed_out(self, &wait, began)),
        }
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryStore")
    }
}
