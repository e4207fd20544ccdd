//! Reconnects broken links while no call maintains them.
//!
//! ```text
//!   call ──locks──▶ SharedLinks ◀──tries to lock── reconnector thread: every LOOK, and when a link arrives
//! ```
//! A call maintains the links that it uses. But a link may break while this rank is in a call of another group, in a call of
//! another kind or in the program's own code, and the rank at the other end may wait for bytes that were lost with the
//! connection. Nobody would send them again, and all would wait for each other until a deadline. So each process has one
//! thread that maintains every link that no call has locked. If it fails, the link keeps the error for the next call.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::hub::Hub;
use super::link::Link;

/// How often links are checked while none is broken: nobody waits much longer than this for a broken one.
const LOOK: Duration = Duration::from_millis(250);

/// How often links are checked while one is broken.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The links of a rank in one group, for one purpose, by the other rank's number in the group.
pub(crate) type Links = HashMap<usize, Link>;

/// Links that one call at a time uses, and the reconnector between calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedLinks(Arc<Mutex<Links>>);

impl SharedLinks {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Links> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a goodbye over every link and closes it.
    pub(crate) fn say_goodbye(&self) {
        let mut links = self.lock();
        links.values_mut().for_each(Link::say_goodbye);
        links.clear();
    }
}

/// The thread that reconnects links.
#[derive(Debug)]
pub(crate) struct Reconnector {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    hub: Hub,
    all: Mutex<Vec<Weak<Mutex<Links>>>>,
    is_ending: AtomicBool,
}

impl Reconnector {
    pub(crate) fn start(hub: Hub) -> io::Result<Self> {
        let shared = Arc::new(Shared { hub, all: Mutex::default(), is_ending: AtomicBool::new(false) });
        let of_thread = shared.clone();
        let thread =
            std::thread::Builder::new().name("drumline-links".into()).spawn(move || of_thread.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn hub(&self) -> &Hub {
        &self.shared.hub
    }

    /// Maintains these links for as long as they are in use.
    pub(crate) fn add(&self, links: &SharedLinks) {
        let (mut all, links) = (self.shared.all(), Arc::downgrade(&links.0));
        if !all.iter().any(|other| other.ptr_eq(&links)) {
            all.push(links);
        }
    }
}

impl Drop for Reconnector {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        self.shared.hub.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn all(&self) -> MutexGuard<'_, Vec<Weak<Mutex<Links>>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while !self.is_ending.load(Ordering::Acquire) {
            let rest = if self.look() { LOOK } else { LOOK_AGAIN };
            self.hub.wait_for_news(rest);
        }
    }

    /// Maintains all links that no call uses at the moment; returns whether none is broken.
    fn look(&self) -> bool {
        let mut is_done = true;
        for links in self.idle() {
            let mut links = match links.try_lock() {
                Ok(links) => links,
                Err(TryLockError::Poisoned(links)) => links.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            for link in links.values_mut() {
                // The link keeps the error, for the call that needs it.
                is_done &= link.maintain(&self.hub).is_err() || !link.is_reconnecting(&self.hub);
            }
        }
        is_done
    }

    /// The links that are still in use.
    fn idle(&self) -> Vec<Arc<Mutex<Links>>> {
        let mut all = self.all();
        all.retain(|links| links.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::hub::tests::{hub_of, name};
    use super::super::security::LinkSecurity;
    use super::*;
    use drumline_rendezvous::JobKey;
    use std::time::Instant;

    /// One end of a link, the only one of its process.
    struct End {
        links: SharedLinks,
        reconnector: Reconnector,
    }

    impl End {
        fn new(rank: usize, key: &JobKey) -> Self {
            let reconnector = Reconnector::start(hub_of(rank, key, LinkSecurity::Mac)).unwrap();
            Self { links: SharedLinks::default(), reconnector }
        }

        fn link<R>(&self, act: impl FnOnce(&mut Link) -> R) -> R {
            act(self.links.lock().get_mut(&0).unwrap())
        }

        /// What arrives until there are `len` bytes, or for a second.
        fn read(&self, len: usize) -> Vec<u8> {
            let (mut all, begin) = (Vec::new(), Instant::now());
            while all.len() < len && begin.elapsed() < Duration::from_secs(1) {
                let mut bytes = vec![0; len - all.len()];
                let read = self.link(|link| link.read(&mut bytes, &mut [])).unwrap();
                all.extend_from_slice(&bytes[..read]);
                std::thread::sleep(Duration::from_millis(2));
            }
            all
        }
    }

    /// The two ends of a link that rank 3 has made to rank 0.
    fn ends() -> (End, End) {
        let key = JobKey::random();
        let (three, zero) = (End::new(3, &key), End::new(0, &key));
        let (address, deadline) = (zero.reconnector.hub().address(), Instant::now() + Duration::from_secs(5));
        let made = Link::dialled(three.reconnector.hub(), address, &name(), deadline).unwrap();
        let arrived = loop {
            match Link::arrived(zero.reconnector.hub(), &name()) {
                Some(link) => break link,
                None => zero.reconnector.hub().wait_for_news(Duration::from_millis(20)),
            }
        };
        three.links.lock().insert(0, made);
        zero.links.lock().insert(0, arrived);
        (three, zero)
    }

    /// One end sends "one", its connection breaks, and it sends "two". Returns what the other end gets after "one".
    fn what_arrives(from: &End, to: &End) -> Vec<u8> {
        assert_eq!(from.link(|link| link.write(b"one", &[])), 3);
        assert_eq!(to.read(3), b"one");
        from.link(|link| {
            link.break_connection();
            link.write(b"two", &[]);
        });
        to.read(3)
    }

    #[test]
    fn a_link_that_breaks_between_calls_is_reconnected() {
        let (three, zero) = ends();
        three.reconnector.add(&three.links);
        zero.reconnector.add(&zero.links);
        assert_eq!(what_arrives(&three, &zero), b"two");
        assert_eq!(what_arrives(&zero, &three), b"two", "from the end that does not connect");
    }

    #[test]
    fn control_a_link_that_is_not_maintained_is_not_reconnected() {
        let (three, zero) = ends();
        assert_eq!(what_arrives(&three, &zero), b"");
    }

    #[test]
    fn links_that_a_call_has_locked_are_not_touched() {
        let (three, zero) = ends();
        three.reconnector.add(&three.links);
        zero.reconnector.add(&zero.links);
        let mut call = three.links.lock();
        call.get_mut(&0).unwrap().break_connection();
        std::thread::sleep(2 * LOOK);
        assert!(call.get_mut(&0).unwrap().is_broken());
        drop(call);
        std::thread::sleep(2 * LOOK);
        assert!(!three.link(|link| link.is_broken()));
    }
}
