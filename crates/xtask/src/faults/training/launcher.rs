//! What starts the ranks on each host.

/// Where the agents meet, or the ranks if there are none.
pub(super) const PORT: &str = "29500";

/// What starts the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// Nothing: each rank is started by hand, one on each host.
    None,
    /// `drumline run --nnodes 2`.
    Fixed {
        /// Restarts in the whole job.
        max_restarts: usize,
    },
    /// `drumline run --nnodes 1:2`.
    Elastic,
}

impl Launcher {
    /// The flags of `drumline run` on a host; `None` where it has no part in it. `first` is the first host's address.
    pub(super) fn flags(self, host: usize, first: &str) -> Option<Vec<String>> {
        let words = match self {
            Launcher::None => return None,
            Launcher::Fixed { max_restarts } => format!(
                "--nnodes 2 --node-rank {host} --master-addr {first} --master-port {PORT} --max-restarts {max_restarts}"
            ),
            Launcher::Elastic => format!("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint {first}:{PORT}"),
        };
        Some(words.split(' ').map(str::to_owned).collect())
    }
}
