//! Posts events in the background: a store that cannot be reached must not delay the error on this rank.
//!
//! One thread posts the events in order. It is started with the first event, so most processes have none: only errors post
//! events, and dropping one of several groups that span nodes.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use drumline_rendezvous::events::Event;

/// Posts events in the background. When it is dropped, all events are posted first.
#[derive(Debug, Default)]
pub(crate) struct EventPoster {
    thread: Mutex<Option<(Sender<Event>, JoinHandle<()>)>>,
}

impl EventPoster {
    /// Posts `event` by calling `post` in the thread.
    pub(crate) fn post(&self, event: Event, post: impl Fn(&Event) + Send + 'static) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (sender, events) = channel::<Event>();
            let run = move || events.into_iter().for_each(|event| post(&event));
            let spawned = std::thread::Builder::new().name("drumline-events".into()).spawn(run);
            *thread = spawned.ok().map(|thread| (sender, thread));
        }
        if let Some((sender, _)) = &*thread {
            // The thread takes events for as long as the sender lives.
            let _ = sender.send(event);
        }
    }

    /// Waits until all events are posted.
    pub(crate) fn finish(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((sender, thread)) = thread {
            drop(sender);
            let _ = thread.join();
        }
    }
}

impl Drop for EventPoster {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    #[test]
    fn a_slow_store_delays_nobody_and_gets_every_event() {
        let num_posted = Arc::new(AtomicUsize::new(0));
        let poster = EventPoster::default();
        let begin = Instant::now();
        for rank in 0..3 {
            let num_posted = num_posted.clone();
            poster.post(Event::Left { rank }, move |event| {
                std::thread::sleep(Duration::from_millis(30));
                let Event::Left { rank } = event else { panic!("{event:?}") };
                assert_eq!(num_posted.fetch_add(1, Ordering::Relaxed), *rank, "in order");
            });
        }
        assert!(begin.elapsed() < Duration::from_millis(30));
        drop(poster);
        assert_eq!(num_posted.load(Ordering::Relaxed), 3);
    }
}
