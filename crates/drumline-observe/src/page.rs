//! The page of `drumline watch`: curves, ranks and the log of one run or several, while they run and after.
//!
//! ```text
//!   browser ── GET /?token=… ─▶ connections, access ─▶ routes ─┬─ assets: HTML, CSS and scripts inside this program
//!           ── GET /update?since=N ─▶ access ─────┴─ watch ─▶ run_folder ─┬─ history: metrics.jsonl ─▶ curves
//!                                                                         ├─ ranks: ranks/*.json ─▶ rows
//!                                                                         └─ log_tail: log.txt ─▶ lines
//!           ── GET /metrics.csv, /detail ─▶ download: metrics.jsonl read again, all of it or some steps in full
//! ```
//!
//! In: folders of runs, which are only read. Out: a page on 127.0.0.1 that can be opened only with its full address, which
//! contains a token. Not here: reading and writing those files (`events`, `status`, `runs`).

mod access;
mod assets;
mod clock;
mod connections;
mod curve;
mod download;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod history;
mod log_tail;
mod ranks;
mod routes;
pub(crate) mod run_folder;
mod waits;
mod watch;

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use access::Access;
use watch::Watch;

pub use watch::Runs;

/// How long open requests may take when the page is closed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of ports that are tried, beginning with the given one.
const MOST_PORTS: u16 = 32;

/// The page cannot be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// Other programs listen there.
    #[error("ports {first} to {last} of 127.0.0.1 are taken; try --port 0, which finds a free one")]
    PortsTaken {
        /// The given port.
        first: u16,
        /// The last one that was tried.
        last: u16,
    },
    /// The port cannot be used, for example because only root may.
    #[error("cannot listen on 127.0.0.1:{port}: {source}; try --port 0, which finds a free one")]
    Listen {
        /// The given port.
        port: u16,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Not a folder, or one that this user may not read.
    #[error("cannot watch `{}`: {source}; try the OUT_DIR of a run, or no folder for all jobs that run", folder.display())]
    Folder {
        /// The given path.
        folder: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The system provides no random numbers.
    #[error("cannot make a token: {0}")]
    Token(#[source] getrandom::Error),
    /// The system provides no threads.
    #[error("cannot start the page's server: {0}")]
    Start(#[source] io::Error),
}

/// A page that has its port and its token. It answers requests once it is started.
///
/// ```
/// use drumline_observe::page::{Page, Runs};
///
/// let folder = tempfile::tempdir()?;
/// let page = Page::bind(0, Runs::Folders(vec![folder.path().to_owned()]))?;
/// assert!(page.url().starts_with("http://127.0.0.1:"));
/// let serving = page.start()?;
/// drop(serving); // the page is closed
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Page {
    listener: TcpListener,
    access: Access,
    watch: Watch,
}

/// The page is open until this is dropped.
#[derive(Debug)]
pub struct Serving {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    /// Takes a port of 127.0.0.1 and makes a token. If the port is taken, the next free one is used; 0 is any. Folders need not
    /// exist yet.
    pub fn bind(port: u16, runs: Runs) -> Result<Self, PageError> {
        let runs = match runs {
            Runs::Folders(folders) => {
                Runs::Folders(folders.iter().map(|folder| whole_path(folder)).collect::<Result<_, _>>()?)
            }
            Runs::Running => Runs::Running,
        };
        let (listener, port) = listen(port)?;
        let access = Access::new(port).map_err(PageError::Token)?;
        Ok(Self { listener, access, watch: Watch::new(runs) })
    }

    /// The address to open, with the token: those who have it can see the page.
    pub fn url(&self) -> String {
        self.access.url()
    }

    /// The port, which may differ from the given one.
    pub fn port(&self) -> u16 {
        self.access.port()
    }

    /// Starts to answer requests, on a thread of its own.
    pub fn start(self) -> Result<Serving, PageError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(PageError::Start)?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("page".to_owned());
        let thread = thread.spawn(move || self.serve(runtime, stopped)).map_err(PageError::Start)?;
        Ok(Serving { stop: Some(stop), thread: Some(thread) })
    }

    fn serve(self, runtime: Runtime, stopped: oneshot::Receiver<()>) {
        let routes = routes::routes(Arc::new(self.access), Arc::new(Mutex::new(self.watch)));
        runtime.block_on(async move {
            let Ok(listener) = tokio::net::TcpListener::from_std(self.listener) else { return };
            tokio::select! {
                () = connections::serve(listener, routes) => {}
                // An error means that the sender was dropped, which is the sign to stop.
                _ = stopped => {}
            }
        });
        runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// Listens on a port, or on one of the next ones.
fn listen(first: u16) -> Result<(TcpListener, u16), PageError> {
    let last = if first == 0 { 0 } else { first.saturating_add(MOST_PORTS - 1) };
    for port in first..=last {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        });
        match listener {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            listener => return listener.map_err(|source| PageError::Listen { port, source }),
        }
    }
    Err(PageError::PortsTaken { first, last })
}

/// The full path of a folder, also of one that does not exist yet.
fn whole_path(folder: &Path) -> Result<PathBuf, PageError> {
    let whole = match folder.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::path::absolute(folder),
        Ok(whole) if !whole.is_dir() => Err(io::ErrorKind::NotADirectory.into()),
        whole => whole,
    };
    whole.map_err(|source| PageError::Folder { folder: folder.to_owned(), source })
}
