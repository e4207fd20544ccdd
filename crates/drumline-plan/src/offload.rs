//! What lies where if the states of a training are larger than a device: whole units, as many as fit.
//!
//! ```text
//!   device   units that stay, and for those on disk two buffers: one unit is stepped while others are read and written
//!   host     units that are stepped in host memory, beside a GPU
//!   disk     the rest
//! ```
//! On a rank that trains on the CPU the device is its host memory. A plan decides about bytes; what a unit's bytes are, and
//! what is free, is measured by whoever asks.

/// Where the state of a unit lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Where the model trains.
    Device,
    /// In host memory.
    Host,
    /// In a file.
    Disk,
}

impl Tier {
    /// All of them, the fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

/// The bytes that are free for a rank's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// Where the model trains, after parameters, gradients and activations.
    pub device: u64,
    /// In host memory, beside a GPU.
    pub host: u64,
    /// On disk.
    pub disk: u64,
}

/// States fit nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the optimizer's state has {needed} bytes for each rank, and {} fit on the device, {} in host memory and {} on disk; \
     try more ranks, a smaller model or optimizer, or room for {missing} bytes more",
    room.device, room.host, room.disk
)]
pub struct NoRoom {
    /// The bytes of all units.
    pub needed: u64,
    /// What is free.
    pub room: Room,
    /// What does not fit.
    pub missing: u64,
}

/// Where the state of each unit lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadPlan {
    units: Vec<u64>,
    tiers: Vec<Tier>,
}

impl OffloadPlan {
    /// Offloads this part of the bytes, in whole units from the first on, and at least that much. A ratio of 1 is all.
    pub fn by_ratio(units: &[u64], ratio: f64, tier: Tier) -> Self {
        let wanted = units.iter().sum::<u64>() as f64 * ratio;
        let mut offloaded = 0;
        let tier_of = |bytes: &u64| {
            if offloaded as f64 >= wanted {
                return Tier::Device;
            }
            offloaded += bytes;
            tier
        };
        Self { units: units.to_vec(), tiers: units.iter().map(tier_of).collect() }
    }

    /// Keeps as many bytes on the device as fit beside the buffers of the others, which fill host memory and then the disk.
    pub fn as_fits(units: &[u64], room: Room) -> Result<Self, NoRoom> {
        if units.iter().sum::<u64>() <= room.device {
            return Ok(Self { units: units.to_vec(), tiers: vec![Tier::Device; units.len()] });
        }
        let mut largest_first: Vec<usize> = (0..units.len()).collect();
        largest_first.sort_by_key(|unit| std::cmp::Reverse(units[*unit]));
        let mut sizes: Vec<u64> = units.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let staying = sizes.iter().filter_map(|most| stay(units, &largest_first, room.device, *most));
        let staying = staying.max_by_key(|stay| total(units, stay)).unwrap_or_default();
        let mut tiers = vec![Tier::Disk; units.len()];
        staying.iter().for_each(|unit| tiers[*unit] = Tier::Device);
        let mut left = room.host;
        for unit in largest_first.iter().filter(|unit| !staying.contains(unit)) {
            if units[*unit] <= left {
                left -= units[*unit];
                tiers[*unit] = Tier::Host;
            }
        }
        let plan = Self { units: units.to_vec(), tiers };
        let missing = plan.bytes(Tier::Disk).saturating_sub(room.disk);
        // Where not even the buffers fit, nothing does.
        let missing = missing.max(plan.buffers().saturating_sub(room.device));
        if missing == 0 { Ok(plan) } else { Err(NoRoom { needed: units.iter().sum(), room, missing }) }
    }

    /// Beside a GPU: keeps as many bytes there as fit, in whole units, the largest first. The others are stepped in host
    /// memory, where each takes as many bytes as `on_host` says: its state, and what is copied.
    pub fn beside_gpu(units: &[u64], on_host: &[u64], room: Room) -> Result<Self, NoRoom> {
        let mut largest_first: Vec<usize> = (0..units.len()).collect();
        largest_first.sort_by_key(|unit| std::cmp::Reverse(units[*unit]));
        let (mut tiers, mut left) = (vec![Tier::Host; units.len()], room.device);
        for unit in largest_first {
            if units[unit] <= left {
                left -= units[unit];
                tiers[unit] = Tier::Device;
            }
        }
        Self { units: units.to_vec(), tiers }.in_host_memory(on_host, room)
    }

    /// The same plan, if what lies in host memory fits there.
    pub fn in_host_memory(self, on_host: &[u64], room: Room) -> Result<Self, NoRoom> {
        let of_host = self.tiers.iter().zip(on_host).filter(|(tier, _)| **tier == Tier::Host);
        let missing = of_host.map(|(_, bytes)| bytes).sum::<u64>().saturating_sub(room.host);
        if missing == 0 { Ok(self) } else { Err(NoRoom { needed: self.units.iter().sum(), room, missing }) }
    }

    /// Where each unit's state lies.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// The bytes in a tier.
    pub fn bytes(&self, tier: Tier) -> u64 {
        self.units.iter().zip(&self.tiers).filter(|(_, of)| **of == tier).map(|(bytes, _)| bytes).sum()
    }

    /// The number of units in a tier.
    pub fn num_units(&self, tier: Tier) -> usize {
        self.tiers.iter().filter(|of| **of == tier).count()
    }

    /// The bytes of the buffers on the device: the two largest units that are not there.
    pub fn buffers(&self) -> u64 {
        let mut away: Vec<u64> = self.away().collect();
        away.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        away.iter().take(2).sum()
    }

    fn away(&self) -> impl Iterator<Item = u64> {
        self.units.iter().zip(&self.tiers).filter(|(_, tier)| **tier != Tier::Device).map(|(bytes, _)| *bytes)
    }

    /// The seconds that a step takes at least, because state is read from disk and written back at these rates, in bytes
    /// per second.
    pub fn seconds_of_disk(&self, read: f64, write: f64) -> f64 {
        let bytes = self.bytes(Tier::Disk) as f64;
        bytes / read + bytes / write
    }
}

/// The units that stay if none of those that go is larger than `most`; `None` if that does not fit.
fn stay(units: &[u64], largest_first: &[usize], room: u64, most: u64) -> Option<Vec<usize>> {
    let mut left = room.checked_sub(2 * most)?;
    let mut stay = Vec::new();
    for unit in largest_first {
        if units[*unit] <= left {
            left -= units[*unit];
            stay.push(*unit);
        } else if units[*unit] > most {
            return None;
        }
    }
    Some(stay)
}

fn total(units: &[u64], chosen: &[usize]) -> u64 {
    chosen.iter().map(|unit| units[*unit]).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_fits_stays() {
        let units = [10, 10, 10, 40];
        let room = |device| Room { device, host: 0, disk: 1000 };
        let tiers = |device| OffloadPlan::as_fits(&units, room(device)).unwrap().tiers().to_vec();
        use Tier::{Device, Disk};
        assert_eq!(tiers(70), [Device; 4]);
        // The large one stays, because buffers for it would take more than it.
        assert_eq!(tiers(69), [Disk, Disk, Disk, Device]);
        assert_eq!(OffloadPlan::as_fits(&units, room(80)).unwrap().buffers(), 0);
        assert_eq!(OffloadPlan::as_fits(&units, room(69)).unwrap().buffers(), 20);
        assert_eq!(OffloadPlan::by_ratio(&units, 0.3, Disk).tiers(), [Disk, Disk, Disk, Device]);
        assert_eq!(OffloadPlan::by_ratio(&units, 0.0, Disk).tiers(), [Device; 4]);
        assert_eq!(OffloadPlan::by_ratio(&units, 1.0, Disk).tiers(), [Disk; 4]);
    }

    #[test]
    fn too_little_room_says_what_is_missing() {
        let error = OffloadPlan::as_fits(&[40, 40, 40], Room { device: 80, host: 0, disk: 100 }).unwrap_err();
        assert_eq!((error.needed, error.missing), (120, 20));
        let text = error.to_string();
        assert!(text.contains("120 bytes for each rank, and 80 fit on the device"), "{text}");
        assert!(text.ends_with("or room for 20 bytes more"), "{text}");
    }

    #[test]
    fn a_gpu_keeps_what_fits_and_host_memory_must_have_the_rest() {
        use Tier::{Device, Host};
        let (units, on_host) = ([10, 40, 10, 10], [12, 46, 12, 12]);
        let plan = |device, host| OffloadPlan::beside_gpu(&units, &on_host, Room { device, host, disk: 0 });
        assert_eq!(plan(70, 0).unwrap().tiers(), [Device; 4]);
        assert_eq!(plan(69, 12).unwrap().tiers(), [Device, Device, Device, Host]);
        assert_eq!(plan(25, 58).unwrap().tiers(), [Device, Host, Device, Host]);
        assert_eq!(plan(0, 82).unwrap().bytes(Host), 70);
        let error = plan(25, 57).unwrap_err();
        assert_eq!((error.needed, error.missing), (70, 1));
        assert!(error.to_string().contains("25 fit on the device, 57 in host memory"), "{error}");
        let half = |host| {
            let room = Room { host, ..Room::default() };
            OffloadPlan::by_ratio(&units, 0.5, Host).in_host_memory(&on_host, room)
        };
        assert_eq!(half(58).unwrap().tiers(), [Host, Host, Device, Device]);
        assert_eq!(half(50).unwrap_err().missing, 8);
    }

    #[test]
    fn a_step_takes_as_long_as_the_disk() {
        let plan = OffloadPlan::by_ratio(&[1 << 30, 1 << 30], 1.0, Tier::Disk);
        assert_eq!(plan.seconds_of_disk((1u64 << 30) as f64, (2u64 << 30) as f64), 3.0);
    }

    proptest! {
        #[test]
        fn plans_fit_and_keep_what_fits(
            units in prop::collection::vec(1u64..1000, 1..20),
            device in 0u64..8000,
            host in 0u64..4000,
            disk in 0u64..20000,
        ) {
            let room = Room { device, host, disk };
            let all: u64 = units.iter().sum();
            match OffloadPlan::as_fits(&units, room) {
                Ok(plan) => {
                    prop_assert_eq!(Tier::ALL.map(|tier| plan.bytes(tier)).iter().sum::<u64>(), all);
                    prop_assert!(plan.bytes(Tier::Device) + plan.buffers() <= device);
                    prop_assert!(plan.bytes(Tier::Host) <= host && plan.bytes(Tier::Disk) <= disk);
                    prop_assert_eq!(plan.buffers() == 0, all <= device);
                    let most = plan.away().max().unwrap_or(0);
                    let left = device.saturating_sub(plan.bytes(Tier::Device) + 2 * most);
                    prop_assert!(plan.away().all(|bytes| bytes > left), "{:?} {}", plan, left);
                }
                Err(error) => prop_assert!(error.missing > 0 && error.needed == all && all > device),
            }
        }
    }
}
