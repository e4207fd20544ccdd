//! What people are told of hosts that fall silent and come back.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::membership::{AgentId, Policy};

/// A shorter silence is not worth a word, unless it is half of the host timeout.
const WORTH_A_WORD: Duration = Duration::from_secs(3);

/// An agent, and for how long nothing was heard from it.
pub(super) struct Silence {
    pub(super) agent: AgentId,
    /// What people call its host.
    pub(super) host: String,
    pub(super) span: Duration,
}

/// The silences that were spoken of.
#[derive(Debug)]
pub(super) struct Silences {
    host_timeout: Duration,
    /// From this length on.
    longer_than: Duration,
    /// The length of each, as last seen.
    said: BTreeMap<AgentId, Duration>,
}

impl Silences {
    pub(super) fn new(policy: &Policy) -> Self {
        let longer_than = (policy.host_timeout / 2).min(WORTH_A_WORD).max(3 * policy.heartbeat);
        Self { host_timeout: policy.host_timeout, longer_than, said: BTreeMap::new() }
    }

    /// What should be said now that the agents that are counted on were silent for so long.
    pub(super) fn look(&mut self, all: &[Silence]) -> Vec<String> {
        self.said.retain(|agent, _| all.iter().any(|silence| silence.agent == *agent));
        all.iter().filter_map(|silence| self.word(silence)).collect()
    }

    fn word(&mut self, Silence { agent, host, span }: &Silence) -> Option<String> {
        let before = self.said.get(agent).copied();
        if *span < self.longer_than {
            self.said.remove(agent);
            return before.map(|before| format!("{host} is back after {:.1} s", before.as_secs_f64()));
        }
        let word = format!(
            "nothing heard from {host} for {:.1} s; waiting for up to {:?} (--host-timeout), and the ranks are left alone",
            span.as_secs_f64(),
            self.host_timeout
        );
        self.said.insert(*agent, *span);
        before.is_none().then_some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_silence_is_told_once_and_so_is_its_end() {
        let mut silences = Silences::new(&Policy::default());
        let one = |millis| Silence {
            agent: AgentId(1),
            host: "host1".to_string(),
            span: Duration::from_millis(millis),
        };
        let mut look = |millis| silences.look(&[one(millis)]);
        assert!(look(2_900).is_empty());
        assert!(look(3_000)[0].starts_with("nothing heard from host1 for 3.0 s; waiting for up to 30s"));
        assert!(look(5_200).is_empty());
        assert_eq!(look(100), ["host1 is back after 5.2 s"]);
        assert!(look(200).is_empty());
        look(4_000);
        silences.look(&[]);
        assert!(silences.said.is_empty(), "it is not counted on any more");
    }
}
