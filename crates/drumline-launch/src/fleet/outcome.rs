//! Derives how the whole job ended from how each host's command ended: a pure function.

use rustix::process::Signal;

use crate::{Exit, signal_name};

/// The exit code of `ssh` when it fails itself; an agent never uses it.
const SSH_FAILED: i32 = 255;
/// The exit codes of shells when the program cannot be run or does not exist.
const NO_PROGRAM: [i32; 2] = [126, 127];

/// How the job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetEnd {
    /// The exit code of the whole job: 128 + the signal that stopped it, or else that of the first host that failed.
    pub code: i32,
    /// Problems that no agent can have reported.
    pub problems: Vec<HostProblem>,
}

/// A problem with a host, or with the connection to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostProblem {
    /// The host cannot be reached.
    #[error("cannot reach {host}: {output}; try `ssh {host} true` by hand, --ssh-port, or --exclude {host}")]
    Unreachable {
        /// The host.
        host: String,
        /// The last line that the starter printed.
        output: String,
    },
    /// The starter could not be started at all.
    #[error("cannot start `{program}` for {host}: {error}; try installing it, or another --launcher")]
    NoStarter {
        /// The host.
        host: String,
        /// The starter.
        program: String,
        /// The system's error.
        error: String,
    },
    /// The host has no `drumline`.
    #[error("{host} cannot run drumline: {output}; try installing it there at the same path as here")]
    NoDrumline {
        /// The host.
        host: String,
        /// The last line that it printed.
        output: String,
    },
    /// The command that led to the host was killed on this machine.
    #[error("the connection to {host} was ended by {signal}; its ranks end with it")]
    Cut {
        /// The host.
        host: String,
        /// The signal's name.
        signal: &'static str,
    },
    /// The host was asked to end and did not.
    #[error("{host} did not end in time; try looking there for processes of this job")]
    Lost {
        /// The host.
        host: String,
    },
}

/// How one host's command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostEnd {
    pub(super) host: String,
    pub(super) exit: Exit,
    /// The last line of its stderr.
    pub(super) output: String,
}

impl HostEnd {
    /// The problem that the leader must report, because no agent did.
    pub(super) fn problem(&self) -> Option<HostProblem> {
        let host = self.host.clone();
        let output = self.output.clone();
        match self.exit {
            Exit::Code(SSH_FAILED) => Some(HostProblem::Unreachable { host, output }),
            Exit::Code(code) if NO_PROGRAM.contains(&code) => Some(HostProblem::NoDrumline { host, output }),
            Exit::Code(_) => None,
            Exit::Signal(signal) => Some(HostProblem::Cut { host, signal: signal_name(signal) }),
            Exit::StoppedByUs | Exit::Unkillable => Some(HostProblem::Lost { host }),
        }
    }

    fn code(&self) -> i32 {
        match self.exit {
            Exit::Code(code) if self.problem().is_none() => code,
            _ => 1,
        }
    }
}

/// The outcome of the whole job, from the ends of the hosts in order of time. A job that a signal stopped ends as a shell
/// reports it: an agent that learns of the stop from another agent does not know the signal, and may end first.
pub(super) fn outcome(ends: &[HostEnd], stopped_by: Option<Signal>) -> FleetEnd {
    let first_failed = ends.iter().map(HostEnd::code).find(|code| *code != 0);
    let code = first_failed.map_or(0, |code| stopped_by.map_or(code, |signal| 128 + signal.as_raw()));
    FleetEnd { code, problems: ends.iter().filter_map(HostEnd::problem).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(host: &str, exit: Exit) -> HostEnd {
        HostEnd { host: host.to_string(), exit, output: "no route".to_string() }
    }

    #[test]
    fn the_first_failed_host_determines_the_exit_code() {
        let code = |exits: &[Exit]| {
            outcome(&exits.iter().map(|exit| end("a", *exit)).collect::<Vec<_>>(), None).code
        };
        assert_eq!(code(&[Exit::Code(0), Exit::Code(0)]), 0);
        assert_eq!(code(&[Exit::Code(0), Exit::Code(130), Exit::Code(1)]), 130);
        assert_eq!(code(&[Exit::Code(255), Exit::Code(143)]), 1);
        assert_eq!(code(&[Exit::Signal(9), Exit::Code(143)]), 1);
    }

    #[test]
    fn a_job_that_a_signal_stopped_says_so_whichever_host_ends_first() {
        let ends = [end("a", Exit::Code(1)), end("b", Exit::Code(130))];
        assert_eq!(outcome(&ends, Some(Signal::INT)).code, 130);
        assert_eq!(outcome(&ends, None).code, 1, "the control");
        assert_eq!(outcome(&[end("a", Exit::Code(0))], Some(Signal::INT)).code, 0, "it had finished before");
    }

    #[test]
    fn problems_that_no_agent_can_report_are_reported() {
        for (exit, output) in [
            (Exit::Code(255), "cannot reach a: no route; try `ssh a true`"),
            (Exit::Code(127), "a cannot run drumline: no route"),
            (Exit::Signal(9), "ended by SIGKILL"),
            (Exit::Unkillable, "a did not end in time"),
        ] {
            let problems = outcome(&[end("a", exit), end("b", Exit::Code(143))], None).problems;
            assert_eq!(problems.len(), 1);
            assert!(problems[0].to_string().contains(output), "{}", problems[0]);
        }
        assert_eq!(outcome(&[end("a", Exit::Code(1))], None).problems, []);
    }
}
