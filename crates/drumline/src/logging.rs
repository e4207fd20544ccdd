//! Lines of `tracing` on stderr: the master's from INFO on, the others' from WARN on, so that what all ranks say is seen once.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::ending::own_rank;

/// Where a filter is looked for; the first that has one counts.
const VARIABLES: [&str; 2] = ["DRUMLINE_LOG", EnvFilter::DEFAULT_ENV];

/// What is shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// This rank; from the launcher's variables (torchrun's, MPI's, Slurm's), if it is not said. A process without a launcher is the master: a program that tells
    /// `init` its rank tells it here, too.
    pub rank: Option<usize>,
    /// Whether each line begins with its rank.
    pub show_rank: bool,
    /// What is shown, in `RUST_LOG`'s words; by the rank, if it is not said. The variables `DRUMLINE_LOG` and then `RUST_LOG` win over both, on all ranks.
    pub filter: Option<String>,
}

/// Why lines could not be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoggingError {
    /// A filter that cannot be read.
    #[error("the log filter `{filter}` cannot be read: {cause}; try `info`, or `warn,drumline=debug`")]
    Filter {
        /// What was asked for.
        filter: String,
        /// What is wrong with it.
        cause: String,
    },
    /// The program shows them already.
    #[error("this process logs already; try calling init_logging once, first of all")]
    Already,
}

/// Shows what the program and its libraries log, from now on; call it first in `main`, before there is a group, so that what is said about its making is shown,
/// and once. Before, and without it, nothing is shown.
///
/// ```
/// drumline::init_logging(drumline::LogOptions { show_rank: true, ..Default::default() })?;
/// tracing::info!("said once, by the master");
/// # Ok::<(), drumline::LoggingError>(())
/// ```
pub fn init_logging(options: LogOptions) -> Result<(), LoggingError> {
    let rank = options.rank.or_else(own_rank).unwrap_or(0);
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter(options.filter, rank)?)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .event_format(Ranked { rank: options.show_rank.then_some(rank), inner: Format::default() });
    lines.try_init().map_err(|_| LoggingError::Already)
}

fn filter(wanted: Option<String>, rank: usize) -> Result<EnvFilter, LoggingError> {
    let by_rank = || if rank == 0 { "info" } else { "warn" }.to_owned();
    let from_env =
        VARIABLES.iter().find_map(|name| std::env::var(name).ok().filter(|filter| !filter.is_empty()));
    let filter = from_env.or(wanted).unwrap_or_else(by_rank);
    filter.parse().map_err(|cause: tracing_subscriber::filter::ParseError| LoggingError::Filter {
        filter: filter.clone(),
        cause: cause.to_string(),
    })
}

/// Lines with their rank before them.
struct Ranked {
    rank: Option<usize>,
    inner: Format<Full>,
}

impl<S, N> FormatEvent<S, N> for Ranked
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(writer, "[rank {rank}] ")?;
        }
        self.inner.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_cannot_be_read_is_told() {
        let told = filter(Some("drumline=loud".into()), 0).unwrap_err().to_string();
        assert!(told.starts_with("the log filter `drumline=loud` cannot be read"), "{told}");
    }
}
