//! Where images are stored: in host memory, where worker threads make batches ahead, or as bytes on the network's
//! device (`DATA.ON_DEVICE`).

use drumline_torch::cuda;
use tch::Device;

use super::config::ImageConfig;
use crate::config::Switch;
use crate::data::{BatchLayout, Images};

/// Images may use one in this many parts of a GPU's free memory. The network is allocated later and needs the rest.
const PART: u64 = 4;

/// Where the images of a run are stored.
#[derive(Debug)]
pub(super) struct Placing {
    place: Place,
    /// A line for the user, if there was a choice.
    pub(super) note: Option<String>,
    device: Device,
    layout: BatchLayout,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Host,
    Device,
}

impl Placing {
    /// Decides for datasets that are used together. Ranks may decide differently, because the batches are the same.
    pub(super) fn of(config: &ImageConfig, device: Device, sets: &[&Images]) -> anyhow::Result<Self> {
        let needed = sets.iter().map(|images| images.bytes_on_device()).sum();
        let free = match device {
            Device::Cuda(index) => Some(cuda::memory(index)?.free),
            _ => None,
        };
        let (place, reason) = decide(config.data.on_device, needed, free);
        let is_last = config.model.memory_format.is_channels_last(device);
        let layout = if is_last { BatchLayout::ChannelsLast } else { BatchLayout::Contiguous };
        let note = reason.map(|reason| line(place, device, &reason));
        Ok(Self { place, note, device, layout })
    }

    /// Moves images to the chosen place.
    pub(super) fn put(&self, images: Images) -> anyhow::Result<Images> {
        match self.place {
            Place::Host => Ok(images),
            Place::Device => Ok(images.on_device(self.device, self.layout)?),
        }
    }
}

/// Chooses the place of images that need `needed` bytes (`None` if unknown), and gives the reason if there was a
/// choice. `free` is the free memory of the GPU, if there is one.
fn decide(wish: Switch, needed: Option<u64>, free: Option<u64>) -> (Place, Option<String>) {
    let size = needed.map(|bytes| format!("{} MB", bytes.div_ceil(1_000_000)));
    match (wish, needed, free) {
        (Switch::Off, ..) | (Switch::Auto, _, None) => (Place::Host, None),
        (Switch::On, ..) => (Place::Device, size),
        (Switch::Auto, None, Some(_)) => {
            (Place::Host, Some("they are resized, or differ in their sizes".to_owned()))
        }
        (Switch::Auto, Some(bytes), Some(free)) if bytes > free / PART => {
            let (size, free) = (size.unwrap_or_default(), free / 1_000_000);
            (Place::Host, Some(format!("{size} are more than a quarter of the {free} MB that are free")))
        }
        (Switch::Auto, Some(_), Some(_)) => (Place::Device, size),
    }
}

fn line(place: Place, device: Device, reason: &str) -> String {
    match (place, device) {
        (Place::Host, _) => format!("[data] == images stay in host memory: {reason} =="),
        (Place::Device, Device::Cuda(index)) => {
            format!("[data] == images are on cuda:{index}, {reason}, and made into batches there ==")
        }
        (Place::Device, _) => format!("[data] == images are kept as one tensor, {reason} =="),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    #[test]
    fn images_go_to_a_gpu_with_enough_memory() {
        let place = |wish, needed, free| decide(wish, needed, free).0;
        for (wish, needed, free, expected) in [
            (Switch::Auto, Some(25 * MB), Some(100 * MB), Place::Device),
            (Switch::Auto, Some(25 * MB + 1), Some(100 * MB), Place::Host),
            (Switch::Auto, None, Some(100 * MB), Place::Host),
            (Switch::Auto, Some(1), None, Place::Host),
            (Switch::On, Some(MB), None, Place::Device),
            (Switch::On, Some(200 * MB), Some(100 * MB), Place::Device),
            (Switch::Off, Some(1), Some(100 * MB), Place::Host),
        ] {
            assert_eq!(place(wish, needed, free), expected, "{wish:?} {needed:?} {free:?}");
        }
    }

    #[test]
    fn the_decision_is_shown_if_there_was_a_choice() {
        let note = |wish, needed, free| {
            let (place, reason) = decide(wish, needed, free);
            reason.map(|reason| line(place, Device::Cuda(1), &reason))
        };
        assert_eq!(note(Switch::Auto, Some(MB), None), None, "on a CPU there is nothing to decide");
        assert_eq!(note(Switch::Off, Some(MB), Some(MB)), None);
        assert_eq!(
            note(Switch::Auto, Some(185 * MB), Some(1000 * MB)).unwrap(),
            "[data] == images are on cuda:1, 185 MB, and made into batches there =="
        );
        assert_eq!(
            note(Switch::Auto, Some(300 * MB), Some(1000 * MB)).unwrap(),
            "[data] == images stay in host memory: 300 MB are more than a quarter of the 1000 MB that are free =="
        );
        assert!(note(Switch::Auto, None, Some(MB)).unwrap().contains("differ in their sizes"));
    }
}
