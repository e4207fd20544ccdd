//! Notices for the user about hosts that fall silent and come back.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::membership::{AgentId, Policy};

/// The silence after which a notice is shown, or half of the host timeout if that is shorter.
const NOTICE_AFTER: Duration = Duration::from_secs(3);

/// An agent, and how long it has been silent.
pub(super) struct Silence {
    pub(super) agent: AgentId,
    /// The name of its host, for the user.
    pub(super) host: String,
    pub(super) span: Duration,
}

/// Decides which silences to announce, each of them once.
#[derive(Debug)]
pub(super) struct SilenceNotices {
    host_timeout: Duration,
    /// A silence of at least this length is announced.
    notice_after: Duration,
    /// The announced silences, with their length when last seen.
    announced: BTreeMap<AgentId, Duration>,
}

impl SilenceNotices {
    pub(super) fn new(policy: &Policy) -> Self {
        let notice_after = (policy.host_timeout / 2).min(NOTICE_AFTER).max(3 * policy.heartbeat);
        Self { host_timeout: policy.host_timeout, notice_after, announced: BTreeMap::new() }
    }

    /// The notices to show now, given how long each watched agent has been silent.
    pub(super) fn update(&mut self, all: &[Silence]) -> Vec<String> {
        self.announced.retain(|agent, _| all.iter().any(|silence| silence.agent == *agent));
        all.iter().filter_map(|silence| self.notice(silence)).collect()
    }

    fn notice(&mut self, Silence { agent, host, span }: &Silence) -> Option<String> {
        let before = self.announced.get(agent).copied();
        if *span < self.notice_after {
            self.announced.remove(agent);
            return before.map(|before| format!("{host} is back after {:.1} s", before.as_secs_f64()));
        }
        let notice = format!(
            "no message from {host} for {:.1} s; waiting for up to {:?} (--host-timeout), and the ranks keep running",
            span.as_secs_f64(),
            self.host_timeout
        );
        self.announced.insert(*agent, *span);
        before.is_none().then_some(notice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_silence_is_announced_once_and_so_is_its_end() {
        let mut silences = SilenceNotices::new(&Policy::default());
        let one = |millis| Silence {
            agent: AgentId(1),
            host: "host1".to_string(),
            span: Duration::from_millis(millis),
        };
        let mut update = |millis| silences.update(&[one(millis)]);
        assert!(update(2_900).is_empty());
        assert!(update(3_000)[0].starts_with("no message from host1 for 3.0 s; waiting for up to 30s"));
        assert!(update(5_200).is_empty());
        assert_eq!(update(100), ["host1 is back after 5.2 s"]);
        assert!(update(200).is_empty());
        update(4_000);
        silences.update(&[]);
        assert!(silences.announced.is_empty(), "it is no longer watched");
    }
}
