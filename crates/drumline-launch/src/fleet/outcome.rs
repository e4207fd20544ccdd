//! How a fleet's job ended, from how each host's command ended: a pure decision.

use crate::{Exit, signal_name};

/// `ssh` ends with this when it failed itself; an agent never does.
const SSH_FAILED: i32 = 255;
/// What shells end with when there is no such program.
const NO_PROGRAM: [i32; 2] = [126, 127];

/// How the job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetEnd {
    /// The exit code of the whole: that of the first host that did not end well.
    pub code: i32,
    /// What the agents cannot have told.
    pub problems: Vec<HostProblem>,
}

/// What was wrong with a host, or on the way to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostProblem {
    /// There is no way to it.
    #[error("cannot reach {host}: {said}; try `ssh {host} true` by hand, --ssh-port, or --exclude {host}")]
    Unreachable {
        /// The host.
        host: String,
        /// The starter's last words.
        said: String,
    },
    /// The starter could not be started at all.
    #[error("cannot start `{program}` for {host}: {said}; try installing it, or another --launcher")]
    NoStarter {
        /// The host.
        host: String,
        /// The starter.
        program: String,
        /// What the system said.
        said: String,
    },
    /// The host has no `drumline`.
    #[error("{host} cannot run drumline: {said}; try installing it there at the same path as here")]
    NoDrumline {
        /// The host.
        host: String,
        /// The last words.
        said: String,
    },
    /// What led to the host was killed here.
    #[error("what led to {host} was ended by {signal}; its ranks end with it")]
    Cut {
        /// The host.
        host: String,
        /// The signal's name.
        signal: &'static str,
    },
    /// It was asked to end and did not.
    #[error("{host} did not end in time; try to look there for processes of this job")]
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
    pub(super) said: String,
}

impl HostEnd {
    /// What the user must be told by the leader, as no agent did.
    pub(super) fn problem(&self) -> Option<HostProblem> {
        let (host, said) = (self.host.clone(), self.said.clone());
        match self.exit {
            Exit::Code(SSH_FAILED) => Some(HostProblem::Unreachable { host, said }),
            Exit::Code(code) if NO_PROGRAM.contains(&code) => Some(HostProblem::NoDrumline { host, said }),
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

/// The end of the whole, from the hosts' ends in the order in which they came.
pub(super) fn outcome(ends: &[HostEnd]) -> FleetEnd {
    let code = ends.iter().map(HostEnd::code).find(|code| *code != 0).unwrap_or(0);
    FleetEnd { code, problems: ends.iter().filter_map(HostEnd::problem).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(host: &str, exit: Exit) -> HostEnd {
        HostEnd { host: host.to_string(), exit, said: "no route".to_string() }
    }

    #[test]
    fn the_first_that_did_not_end_well_says_how() {
        let code =
            |exits: &[Exit]| outcome(&exits.iter().map(|exit| end("a", *exit)).collect::<Vec<_>>()).code;
        assert_eq!(code(&[Exit::Code(0), Exit::Code(0)]), 0);
        assert_eq!(code(&[Exit::Code(0), Exit::Code(130), Exit::Code(1)]), 130);
        assert_eq!(code(&[Exit::Code(255), Exit::Code(143)]), 1);
        assert_eq!(code(&[Exit::Signal(9), Exit::Code(143)]), 1);
    }

    #[test]
    fn what_no_agent_can_tell_is_told() {
        for (exit, said) in [
            (Exit::Code(255), "cannot reach a: no route; try `ssh a true`"),
            (Exit::Code(127), "a cannot run drumline: no route"),
            (Exit::Signal(9), "ended by SIGKILL"),
            (Exit::Unkillable, "a did not end in time"),
        ] {
            let problems = outcome(&[end("a", exit), end("b", Exit::Code(143))]).problems;
            assert_eq!(problems.len(), 1);
            assert!(problems[0].to_string().contains(said), "{}", problems[0]);
        }
        assert_eq!(outcome(&[end("a", Exit::Code(1))]).problems, []);
    }
}
