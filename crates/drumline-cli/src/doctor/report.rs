//! What `drumline doctor` prints: problems first, then hosts and links, as text or as JSON.

use std::fmt;

use serde::Serialize;

use super::findings::{bytes, findings};
use super::host::{Host, Limits};
use super::links::{Link, Measured};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) problems: Vec<String>,
    hints: Vec<String>,
    /// One host for each machine.
    hosts: Vec<Host>,
    links: Vec<Link>,
    ranks: usize,
}

impl Report {
    /// From each rank's view of its host, and the links between ranks.
    pub(super) fn new(ranks: Vec<Host>, measured: Measured) -> Self {
        let found = findings(&ranks, &measured);
        let (num_ranks, mut hosts) = (ranks.len(), Vec::<Host>::new());
        for host in ranks {
            if !hosts.iter().any(|known| known.machine == host.machine) {
                hosts.push(host);
            }
        }
        Self { problems: found.problems, hints: found.hints, hosts, links: measured.links, ranks: num_ranks }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.len() {
            0 => writeln!(f, "no problem found")?,
            1 => writeln!(f, "1 problem:")?,
            several => writeln!(f, "{several} problems:")?,
        }
        self.problems.iter().try_for_each(|problem| writeln!(f, "  ✗ {problem}"))?;
        self.hints.iter().try_for_each(|hint| writeln!(f, "  · {hint}"))?;
        self.hosts.iter().try_for_each(|host| write_host(f, host))?;
        if !self.links.is_empty() {
            writeln!(f, "\nlinks between {} ranks          latency      bandwidth", self.ranks)?;
        }
        for Link { ranks: [a, b], kind, latency_us, gb_per_s, wrong_bytes } in &self.links {
            let wrong = if *wrong_bytes > 0 { format!("  {wrong_bytes} bytes wrong") } else { String::new() };
            let pair = format!("{a} – {b}");
            writeln!(
                f,
                "  {pair:<9} {:<13} {latency_us:9.1} µs {gb_per_s:9.2} GB/s{wrong}",
                kind.to_string()
            )?;
        }
        Ok(())
    }
}

fn write_host(f: &mut fmt::Formatter<'_>, host: &Host) -> fmt::Result {
    let Host { name, drumline, kernel, cores, memory, limits, ports, .. } = host;
    writeln!(f, "\n{name}   drumline {drumline}, Linux {kernel}")?;
    writeln!(
        f,
        "  cores       {} usable, {} by affinity, {} in the machine; load {:.1}",
        cores.usable,
        cores.allowed.len(),
        cores.machine,
        cores.load
    )?;
    let limit = memory.limit.map_or("no cgroup limit".to_owned(), |limit| {
        format!("cgroup limit {}, of which {} used", bytes(limit), bytes(memory.limit_used.unwrap_or(0)))
    });
    writeln!(f, "  memory      {} available of {}; {limit}", bytes(memory.available), bytes(memory.total))?;
    for space in host.shm.iter().chain(&host.temporary) {
        let path = space.path.display().to_string();
        writeln!(f, "  {path:<11} {} free of {}", bytes(space.free), bytes(space.total))?;
    }
    writeln!(f, "  limits      {}", shown(limits))?;
    for name in &host.names {
        let addresses: Vec<String> = name.addresses.iter().map(ToString::to_string).collect();
        let found = name.error.clone().unwrap_or_else(|| addresses.join(", "));
        writeln!(
            f,
            "  name        {} ({}): {found}, in {:.0} ms",
            name.name,
            name.given_by,
            name.seconds * 1e3
        )?;
    }
    let range = ports.range.map_or("unknown".to_owned(), |(first, last)| format!("{first} to {last}"));
    let default = if ports.default_taken_by.is_some() { "taken" } else { "free" };
    writeln!(f, "  ports       29500 is {default}; connections use {range}")?;
    if let Some(ahead) = host.clock_ahead_s.filter(|_| host.rank > 0) {
        writeln!(f, "  clock       {:+.1} ms against rank 0's", ahead * 1e3)?;
    }
    Ok(())
}

fn shown(limits: &Limits) -> String {
    let Limits { open_files, open_files_hard, processes, address_space, locked_memory, file_size } = limits;
    let number = |limit: &Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let size = |limit: &Option<u64>| limit.map_or("unlimited".to_owned(), bytes);
    format!(
        "open files {} (up to {}), processes {}, address space {}, locked memory {}, file size {}",
        number(open_files),
        number(open_files_hard),
        number(processes),
        size(address_space),
        size(locked_memory),
        size(file_size)
    )
}

#[cfg(test)]
mod tests {
    use super::super::findings::tests::{healthy, link};
    use super::super::links::{FailedPair, LinkKind};
    use super::*;

    #[test]
    fn problems_come_first_and_each_machine_once() {
        let mut hosts = vec![healthy(0, "n1"), healthy(1, "n1"), healthy(2, "n2")];
        let links = vec![link([0, 1], LinkKind::SharedMemory, 8.0), link([0, 2], LinkKind::Tcp, 1.0)];
        let measured = Measured { links, failed: None };
        let text = Report::new(hosts.clone(), measured.clone()).to_string();
        assert!(text.starts_with("no problem found\n\nn1   drumline 0.1.0, Linux 6.1\n"), "{text}");
        assert_eq!(text.matches("  cores ").count(), 2, "{text}");
        assert!(text.contains("  0 – 2     TCP                20.0 µs      1.00 GB/s\n"), "{text}");
        hosts[2].shm = None;
        let report = Report::new(hosts, measured);
        let text = report.to_string();
        assert!(text.starts_with("1 problem:\n  ✗ n2: /dev/shm is missing"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (json["problems"].as_array().unwrap().len(), json["hosts"].as_array().unwrap().len()),
            (1, 2)
        );
        assert_eq!(json["links"][0]["way"], "shared_memory");
    }

    #[test]
    fn a_pair_that_failed_is_a_problem_next_to_all_other_results() {
        let hosts = vec![healthy(0, "n1"), healthy(1, "n2"), healthy(2, "n3")];
        let links = vec![link([0, 1], LinkKind::Tcp, 1.0)];
        let cause = "connection refused".to_owned();
        let failed = Some(FailedPair { ranks: [0, 2], kind: LinkKind::Tcp, cause, num_left: 1 });
        let text = Report::new(hosts, Measured { links, failed }).to_string();
        let problem = "1 problem:\n  ✗ between rank 0 (n1) and rank 2 (n3), over TCP, messages do not get through: connection refused; ";
        assert!(text.starts_with(problem), "{text}");
        assert!(text.contains("1 more pair was not measured"), "{text}");
        assert!(text.contains("\nn3   drumline") && text.contains("  0 – 1     TCP "), "{text}");
    }
}
