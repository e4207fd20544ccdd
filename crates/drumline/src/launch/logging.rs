//! Log lines of `tracing` on stderr: from INFO on rank 0, from WARN on the others, so that common lines are shown once.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::launch::ending::own_rank;

/// The variables with a filter; the first that is set counts.
const VARIABLES: [&str; 2] = ["DRUMLINE_LOG", EnvFilter::DEFAULT_ENV];

/// Options of [`init_logging`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// This rank; by default from the launcher's variables (torchrun's, MPI's, Slurm's), or 0 without a launcher. A
    /// program that passes its rank to `init` should pass it here, too.
    pub rank: Option<usize>,
    /// Whether each line begins with its rank.
    pub show_rank: bool,
    /// A filter in the syntax of `RUST_LOG`; by default INFO on rank 0 and WARN on the others. The variables
    /// `DRUMLINE_LOG` and then `RUST_LOG` override it, on all ranks.
    pub filter: Option<String>,
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoggingError {
    /// The filter is invalid.
    #[error("the log filter `{filter}` cannot be read: {cause}; try `info`, or `warn,drumline=debug`")]
    Filter {
        /// The filter.
        filter: String,
        /// What is wrong with it.
        cause: String,
    },
    /// Logging was set up before.
    #[error("this process logs already; try calling init_logging once, first of all")]
    Already,
}

/// Shows what the program and its libraries log. Call it once, first in `main`, before there is a group, so that log
/// lines about joining the job are shown. Without it nothing is shown.
///
/// ```
/// drumline::init_logging(drumline::LogOptions { show_rank: true, ..Default::default() })?;
/// tracing::info!("shown once, by rank 0");
/// # Ok::<(), drumline::launch::LoggingError>(())
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

/// Formats lines with their rank in front.
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
    fn an_invalid_filter_is_an_error() {
        let message = filter(Some("drumline=loud".into()), 0).unwrap_err().to_string();
        assert!(message.starts_with("the log filter `drumline=loud` cannot be read"), "{message}");
    }
}
