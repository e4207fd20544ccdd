//! A line to a coordinator on another host: reports out, orders in, over connections of its own.
//!
//! ```text
//!   speaker ── report ──▶ thread, TcpStore ──▶ REPORTS log ─▶ coordinator
//!      ▲                                                        │
//!      └─ sign of life ── thread, TcpStore ◀── orders log ◀─────┘
//! ```
//!
//! After an outage TCP sends again only when its back-off has run out, which takes as long as the outage did. So a line on
//! which no order follows a report in time is left to itself, and a fresh one takes its place: its threads end when their
//! connections do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use drumline_rendezvous::Store;

use super::Happening;
use super::control::{Address, REPORTS, ToCoordinator, orders_of, read_log, spawn};
use crate::membership::{AgentId, Doing, Order, Report};

/// A pause after a line that failed at once.
const PAUSE: Duration = Duration::from_millis(100);

/// What comes back on a line.
#[derive(Debug, PartialEq, Eq)]
enum Sign {
    /// A connection is there.
    Open,
    /// The store has a report.
    Taken,
    /// An order came.
    Order,
}

/// Who speaks and how patiently.
pub(super) struct Speaker {
    pub(super) id: AgentId,
    pub(super) address: Address,
    pub(super) events: Sender<Happening>,
    /// How long the answer to a report may take before it is sent again over a fresh line.
    pub(super) timeout: Duration,
}

struct Line {
    reports: Sender<Vec<u8>>,
    signs: Receiver<Sign>,
    is_wanted: Arc<AtomicBool>,
}

impl Speaker {
    /// Sends each report until there are no more; of several that wait only the last, which says it all.
    pub(super) fn speak(&self, outbox: &Receiver<ToCoordinator>) {
        let (mut line, mut unanswered) = (None, None);
        while let Some(report) = newest(outbox, unanswered.take()) {
            let is_answered = line.get_or_insert_with(|| self.open()).carries(&report, self.timeout);
            if !is_answered {
                tracing::debug!(number = report.number, "a report was not answered; it is sent again");
                (line, unanswered) = (None, Some(report));
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn open(&self) -> Line {
        let ((reports, outgoing), (sign, signs)) = (mpsc::channel::<Vec<u8>>(), mpsc::channel());
        let is_wanted = Arc::new(AtomicBool::new(true));
        let (address, within, taken) = (self.address.clone(), self.timeout, sign.clone());
        let speak = move || {
            let Ok(store) = address.connect(Instant::now() + within) else { return };
            let _ = taken.send(Sign::Open);
            for report in outgoing {
                if store.append(REPORTS, &report).is_err() || taken.send(Sign::Taken).is_err() {
                    return;
                }
            }
        };
        let (address, events, key) = (self.address.clone(), self.events.clone(), orders_of(self.id));
        let wanted = Arc::clone(&is_wanted);
        let listen = move || {
            let Ok(store) = address.connect(Instant::now() + within) else { return };
            let _ = sign.send(Sign::Open);
            let is_wanted = || wanted.load(Ordering::Relaxed);
            read_log(&store, &key, is_wanted, |order: Order| {
                let is_heard = events.send(Happening::Order(Box::new(order))).is_ok();
                is_heard && sign.send(Sign::Order).is_ok()
            });
        };
        // A line without its threads carries nothing, and is replaced like any other.
        let started = spawn("drumline-reports", speak).and_then(|_| spawn("drumline-orders", listen));
        if let Err(error) = started {
            tracing::warn!(%error, "no line to the coordinator");
        }
        Line { reports, signs, is_wanted }
    }
}

impl Line {
    /// Sends a report, and waits for an order; the last one, by which an agent says that it ends, gets none.
    fn carries(&self, report: &Report, timeout: Duration) -> bool {
        let wanted = if report.doing == Doing::Over { Sign::Taken } else { Sign::Order };
        self.signs.try_iter().for_each(drop);
        let Ok(mut line) = serde_json::to_vec(report) else { return true };
        line.push(b'\n');
        if self.reports.send(line).is_err() {
            return false;
        }
        // Each step on the way has this time; there are four at most.
        loop {
            match self.signs.recv_timeout(timeout) {
                Ok(sign) if sign == wanted => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.is_wanted.store(false, Ordering::Relaxed);
    }
}

/// The newest report: one that waits, or the `old` one again, or the next one to come. `None` when there are no more.
fn newest(outbox: &Receiver<ToCoordinator>, old: Option<Box<Report>>) -> Option<Box<Report>> {
    let mut newest = old;
    loop {
        let next = if newest.is_some() { outbox.try_recv().ok() } else { Some(outbox.recv().ok()?) };
        match next {
            Some(ToCoordinator::Report(report)) => newest = Some(report),
            Some(_) => {}
            None => return newest,
        }
    }
}
