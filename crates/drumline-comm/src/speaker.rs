//! Tells the others without waiting: a store that can no longer be reached must not hold up the bad news at home.
//!
//! A thread posts what it is given, in that order. It is started with the first event, so a process in which all goes well
//! has none, unless it lets go of one of several groups that span nodes.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use drumline_rendezvous::events::Event;

/// Posts events in the background until dropped; then what was said before still goes out.
#[derive(Debug, Default)]
pub(crate) struct Speaker {
    thread: Mutex<Option<(Sender<Event>, JoinHandle<()>)>>,
}

impl Speaker {
    /// Says `event`, through `post`.
    pub(crate) fn say(&self, event: Event, post: impl Fn(&Event) + Send + 'static) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (sender, events) = channel::<Event>();
            let speak = move || events.into_iter().for_each(|event| post(&event));
            let spawned = std::thread::Builder::new().name("drumline-speaker".into()).spawn(speak);
            *thread = spawned.ok().map(|thread| (sender, thread));
        }
        if let Some((sender, _)) = &*thread {
            // The thread takes events for as long as the sender lives.
            let _ = sender.send(event);
        }
    }

    /// Waits until all has been said.
    pub(crate) fn finish(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((sender, thread)) = thread {
            drop(sender);
            let _ = thread.join();
        }
    }
}

impl Drop for Speaker {
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
    fn a_slow_listener_holds_nobody_up_and_misses_nothing() {
        let heard = Arc::new(AtomicUsize::new(0));
        let speaker = Speaker::default();
        let begin = Instant::now();
        for rank in 0..3 {
            let heard = heard.clone();
            speaker.say(Event::Left { rank }, move |event| {
                std::thread::sleep(Duration::from_millis(30));
                let Event::Left { rank } = event else { panic!("{event:?}") };
                assert_eq!(heard.fetch_add(1, Ordering::Relaxed), *rank, "in order");
            });
        }
        assert!(begin.elapsed() < Duration::from_millis(30));
        drop(speaker);
        assert_eq!(heard.load(Ordering::Relaxed), 3);
    }
}
