//! A link to a coordinator on another host: it sends reports and receives orders, over connections of its own.
//!
//! ```text
//!   ReportSender ── report ──▶ thread, TcpStore ──▶ REPORTS log ─▶ coordinator
//!      ▲                                                            │
//!      └──── LinkEvent ─────── thread, TcpStore ◀── orders log ◀────┘
//! ```
//!
//! After an outage, TCP sends again only when its back-off has run out, which takes as long as the outage did. So if no
//! order answers a report in time, the link is abandoned and a new one replaces it. The old link's threads end with
//! their connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use drumline_rendezvous::Store;

use super::AgentEvent;
use super::control::{Address, AgentHandle, REPORTS, ToCoordinator, orders_of, read_log, spawn};
use crate::membership::{Doing, Order, Report};

/// The pause before a failed link is replaced.
const PAUSE: Duration = Duration::from_millis(100);

/// What a link's threads report.
#[derive(Debug, PartialEq, Eq)]
enum LinkEvent {
    /// A connection is open.
    Open,
    /// The store has accepted a report.
    Accepted,
    /// An order arrived.
    Order,
}

/// Sends an agent's reports to its coordinator.
pub(super) struct ReportSender {
    pub(super) own: AgentHandle,
    pub(super) address: Address,
    /// How long to wait for the answer to a report before it is sent again over a new link.
    pub(super) timeout: Duration,
}

struct CoordinatorLink {
    reports: Sender<Vec<u8>>,
    events: Receiver<LinkEvent>,
    is_wanted: Arc<AtomicBool>,
}

impl ReportSender {
    /// Sends each report until there are no more. Of several queued reports only the last is sent: it carries the
    /// complete state.
    pub(super) fn run(&self, outbox: &Receiver<ToCoordinator>) {
        let mut link = None;
        let mut unanswered = None;
        while let Some(report) = newest(outbox, unanswered.take()) {
            let is_answered = link.get_or_insert_with(|| self.open()).send_and_wait(&report, self.timeout);
            if !is_answered {
                tracing::debug!(number = report.number, "a report was not answered; sending it again");
                link = None;
                unanswered = Some(report);
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn open(&self) -> CoordinatorLink {
        let (reports, outgoing) = mpsc::channel::<Vec<u8>>();
        let (link_events, events) = mpsc::channel();
        let is_wanted = Arc::new(AtomicBool::new(true));
        let timeout = self.timeout;
        let address = self.address.clone();
        let sent = link_events.clone();
        let send_reports = move || {
            let Ok(store) = address.connect(Instant::now() + timeout) else { return };
            let _ = sent.send(LinkEvent::Open);
            for report in outgoing {
                if store.append(REPORTS, &report).is_err() || sent.send(LinkEvent::Accepted).is_err() {
                    return;
                }
            }
        };
        let address = self.address.clone();
        let own = self.own.clone();
        let wanted = Arc::clone(&is_wanted);
        let receive_orders = move || {
            let Ok(store) = address.connect(Instant::now() + timeout) else { return };
            let _ = link_events.send(LinkEvent::Open);
            let is_wanted = || wanted.load(Ordering::Relaxed);
            read_log(&store, &orders_of(own.id), is_wanted, |order: Order| {
                let is_delivered = own.events.send(AgentEvent::Order(Box::new(order))).is_ok();
                is_delivered && link_events.send(LinkEvent::Order).is_ok()
            });
        };
        // A link without its threads carries nothing, and is replaced like any other failed link.
        let started =
            spawn("drumline-reports", send_reports).and_then(|_| spawn("drumline-orders", receive_orders));
        if let Err(error) = started {
            tracing::warn!(%error, "no link to the coordinator");
        }
        CoordinatorLink { reports, events, is_wanted }
    }
}

impl CoordinatorLink {
    /// Sends a report, and waits for the order that answers it. An agent's last report, that it ends, gets no answer.
    /// Returns false if the link fails.
    fn send_and_wait(&self, report: &Report, timeout: Duration) -> bool {
        let wanted = if report.doing == Doing::Over { LinkEvent::Accepted } else { LinkEvent::Order };
        self.events.try_iter().for_each(drop);
        let Ok(mut line) = serde_json::to_vec(report) else { return true };
        line.push(b'\n');
        if self.reports.send(line).is_err() {
            return false;
        }
        // Each step may take this long; there are at most four.
        loop {
            match self.events.recv_timeout(timeout) {
                Ok(event) if event == wanted => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Drop for CoordinatorLink {
    fn drop(&mut self) {
        self.is_wanted.store(false, Ordering::Relaxed);
    }
}

/// The newest report: the last one queued, or the `old` one again, or the next one to arrive. `None` when there are no
/// more.
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
