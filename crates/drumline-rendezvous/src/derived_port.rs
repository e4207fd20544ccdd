//! Derives ports from a job's number, so that all its nodes know them without communication.
//!
//! Another program may use such a port. Then the host takes the next one of a short sequence. The other ranks, which
//! find a server there that does not prove the job's key, try the next one too. All of them know the sequence. The key
//! that they prove is the job's own ([`JobKey::for_job`](crate::JobKey::for_job)), so that two jobs with the same key
//! file whose numbers lead to the same port do not become one.

/// Below the ephemeral ports.
const FIRST: u64 = 15_000;
const COUNT: u64 = 15_000;
/// The distance between two ports of a sequence: large enough that jobs with neighbouring numbers stay apart. It shares
/// no divisor with `COUNT`, so no port occurs twice.
const STRIDE: u64 = 3_701;
/// The distance between the numbers of two steps of a Slurm job. A sum of job and step would give the second step of
/// each job the port of the first step of the next job. This is the golden section of `COUNT`, which keeps the steps of
/// neighbouring jobs far apart, and shares no divisor with it.
const STEP: u64 = 9_271;
/// The number of ports in a sequence. It is unlikely that all of them are in use by accident.
const LENGTH: usize = 4;

/// The port of the job with this number.
///
/// ```
/// assert_eq!(drumline_rendezvous::derived_port(16_003), 16_003);
/// ```
pub fn derived_port(number: u64) -> u16 {
    (FIRST + number % COUNT) as u16
}

/// `port`, which is derived from a number, and the ports that are tried after it, in order.
///
/// ```
/// assert_eq!(drumline_rendezvous::derived_ports(15_001), [15_001, 18_702, 22_403, 26_104]);
/// ```
pub fn derived_ports(port: u16) -> [u16; LENGTH] {
    let offset = u64::from(port).saturating_sub(FIRST);
    std::array::from_fn(|step| derived_port(offset + step as u64 * STRIDE))
}

/// The number of a Slurm step, from which its port is derived; that of a job's first step is the job's.
///
/// ```
/// use drumline_rendezvous::{derived_port, slurm_number};
/// assert_eq!(slurm_number(1000, 0), 1000);
/// assert_ne!(derived_port(slurm_number(1000, 1)), derived_port(slurm_number(1001, 0)));
/// ```
pub fn slurm_number(job: u64, step: u64) -> u64 {
    job.wrapping_add(step.wrapping_mul(STEP))
}

/// The name for [`JobKey::for_job`](crate::JobKey::for_job) of a Slurm step, given as `JOB.STEP`.
pub fn slurm_job(step: &str) -> String {
    format!("slurm {step}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_start_at_their_port_and_never_repeat_one() {
        for number in [0, 1, 14_999, 15_000, 77_777, u64::from(u32::MAX), u64::MAX] {
            let port = derived_port(number);
            let ports = derived_ports(port);
            assert_eq!(ports[0], port, "{number}");
            assert!(ports.iter().all(|port| (15_000..30_000).contains(port)), "{ports:?}");
            let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
            assert_eq!(distinct.len(), ports.len(), "{ports:?}");
        }
    }

    #[test]
    fn steps_of_neighbouring_jobs_have_different_ports() {
        let (jobs, steps) = (1000..1200, 0..16);
        let ports = |number: fn(u64, u64) -> u64| {
            let all = jobs.clone().flat_map(|job| steps.clone().map(move |step| (job, step)));
            all.map(|(job, step)| derived_port(number(job, step))).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(ports(slurm_number).len(), 200 * 16);
        assert_eq!(ports(|job, step| job + step).len(), 215, "control: a sum");
    }
}
