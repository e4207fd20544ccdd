//! Finds the problems of all ranks. Each cause is listed once, with the hosts or ranks that have it.

use super::report::{Found, Rank, Software};

/// The problems that ranks report, version differences from rank 0, and hosts with another number of GPUs.
pub(super) fn problems(ranks: &[Rank]) -> Vec<String> {
    let Some(first) = ranks.first() else { return Vec::new() };
    let mut found: Vec<(String, Vec<&Rank>)> = Vec::new();
    for rank in ranks {
        let differences = differences(&first.software, &rank.software);
        let all = rank.software.problems().into_iter().chain(differences).chain(other_count(first, rank));
        for problem in all {
            match found.iter_mut().find(|(known, _)| *known == problem) {
                Some((_, of)) => of.push(rank),
                None => found.push((problem, vec![rank])),
            }
        }
    }
    found.into_iter().map(|(problem, of)| named(&of, ranks) + &problem).collect()
}

/// Compares only versions that both have: a missing version is already a problem of its own.
fn differences(first: &Software, other: &Software) -> Vec<String> {
    let own = |version: &String| Found::Version(version.clone());
    let parts = |of: &Software| {
        [own(&of.drumline), own(&of.libtorch), of.driver.clone(), of.libraries.clone(), of.nccl.clone()]
    };
    let names = ["drumline", "libtorch", "driver", "libraries", "NCCL"];
    let pairs = parts(first).into_iter().zip(parts(other));
    let differences = names.into_iter().zip(pairs).filter_map(|(name, pair)| match pair {
        (Found::Version(first), Found::Version(other)) if first != other => {
            Some(format!("{name} {other}, rank 0 has {first}; try the same versions on all hosts"))
        }
        _ => None,
    });
    differences.collect()
}

/// A GPU that has failed disappears, so hosts with different counts are a problem. Ranks of the same host may be
/// assigned different GPUs.
fn other_count(first: &Rank, rank: &Rank) -> Option<String> {
    let (expected, found) = (first.num_gpus, rank.num_gpus);
    let differs = rank.host != first.host && expected != found && expected > 0 && found > 0;
    let advice = "try nvidia-smi on both hosts, and CUDA_VISIBLE_DEVICES";
    differs.then(|| format!("GPUs that it sees: {found}, rank 0 sees {expected}; {advice}"))
}

/// A prefix that names the ranks or hosts of a problem. It is empty if there is only one host and all of its ranks have
/// the problem.
fn named(of: &[&Rank], ranks: &[Rank]) -> String {
    let is_one_host = ranks.iter().all(|rank| rank.host == ranks[0].host);
    if of.len() == ranks.len() {
        return if is_one_host { String::new() } else { "all hosts: ".into() };
    }
    let mut names: Vec<String> = of.iter().map(|rank| holder(rank, of, ranks)).collect();
    names.dedup();
    names.join(", ") + ": "
}

/// The host's name if all its ranks have the problem, otherwise the rank.
fn holder(rank: &Rank, of: &[&Rank], ranks: &[Rank]) -> String {
    let here = of.iter().filter(|other| other.host == rank.host).count();
    let all = ranks.iter().filter(|other| other.host == rank.host).count();
    if all == here { rank.host.clone() } else { format!("rank {} ({})", rank.rank, rank.host) }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{rank, software};
    use super::*;

    /// Two ranks on each of two hosts, modified by `change`.
    fn four(change: impl Fn(&mut Rank)) -> Vec<String> {
        let mut ranks: Vec<_> = (0..4).map(|number| rank(number, software("2.28.9"))).collect();
        ranks[2..].iter_mut().for_each(|rank| rank.host = "node2".into());
        ranks.iter_mut().for_each(change);
        problems(&ranks)
    }

    #[test]
    fn equal_ranks_have_no_problems() {
        assert_eq!(four(|_| ()), [""; 0]);
        assert_eq!(problems(&[]), [""; 0]);
    }

    #[test]
    fn each_cause_is_listed_once_with_its_ranks() {
        let gone = |rank: &mut Rank| {
            rank.software.driver = Found::Problem("no driver".into());
            rank.software.libraries = Found::Problem("no driver".into());
            rank.num_gpus = 0;
        };
        assert_eq!(four(gone), ["all hosts: no driver"]);
        assert_eq!(
            four(|rank| if rank.host == "node2" {
                gone(rank)
            }),
            ["node2: no driver"]
        );
        assert_eq!(
            four(|rank| if rank.host == "node1" {
                gone(rank)
            }),
            ["node1: no driver"]
        );
        assert_eq!(
            four(|rank| if rank.rank == 1 {
                gone(rank)
            }),
            ["rank 1 (node1): no driver"]
        );
        assert_eq!(
            four(|rank| if rank.rank > 0 {
                gone(rank)
            }),
            ["rank 1 (node1), node2: no driver"]
        );
    }

    #[test]
    fn other_versions_and_gpu_counts_are_problems() {
        let of_second = |change: fn(&mut Rank)| {
            four(|rank| {
                if rank.host == "node2" {
                    change(rank)
                }
            })
        };
        let expected = |what: &str| [format!("node2: {what}; try the same versions on all hosts")];
        assert_eq!(
            of_second(|rank| rank.software.drumline = "0.0.9".into()),
            expected(&format!("drumline 0.0.9, rank 0 has {}", env!("CARGO_PKG_VERSION")))
        );
        assert_eq!(
            of_second(|rank| rank.software.libtorch = "2.10.0".into()),
            expected("libtorch 2.10.0, rank 0 has 2.11.0")
        );
        assert_eq!(
            of_second(|rank| rank.software.driver = Found::Version("CUDA 13.1".into())),
            expected("driver CUDA 13.1, rank 0 has CUDA 13.0")
        );
        let counted = of_second(|rank| rank.num_gpus = 7);
        assert!(counted[0].starts_with("node2: GPUs that it sees: 7, rank 0 sees 8; try nvidia-smi"));
        assert_eq!(four(|rank| rank.num_gpus = if rank.rank % 2 == 0 { 8 } else { 1 }).len(), 1, "of rank 3");
    }
}
